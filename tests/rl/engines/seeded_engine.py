"""Engines in this process, on the real wire, whose tokens are functions of seed, branch and context."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable

from composer_jax.rl.engines.config import FleetConfig
from composer_jax.rl.engines.description import EngineDescription, EngineStatus, RequiredEngine
from composer_jax.rl.engines.engine_places import ListedEngines
from composer_jax.rl.engines.engine_port import EnginePort, ServedEngine, bind_port
from composer_jax.rl.engines.fleet import FleetPolicy, Publishing
from composer_jax.sampler.policy import Sample
from composer_jax.sampler.weight_checksums import WeightChecksum
from tests.rl.workers.seeded_policy import SeededPolicy, SeededSession

TOKEN = "a token of the tests"
REQUIRED = RequiredEngine("network", "tokenizer", (3,), 4096, None)


def checksums_of(version: int, run: str = "this run"):
    return (WeightChecksum("w", "bfloat16", (3,), f"{run} {version}"),)


class EngineSession(SeededSession):
    async def sample(self, context, params, branch=0):
        sample = await super().sample(context, params, branch)
        return self.policy.spoil(dataclasses.replace(sample, versions=[self.policy.version] * len(sample.tokens)))


class Engine(SeededPolicy):
    """One engine. spoil: changes what it answers. pause_after: contexts above it wait for `gate`.

    `end` ends it as the death of one of its processes does, while the process with the port goes on.
    """

    def __init__(self, slots=8, version=0, **options):
        super().__init__(**options)
        self.version, self.run, self.progress, self.resets, self.reloads, self.paused = (
            version,
            "this run",
            0,
            0,
            0,
            False,
        )
        self.newest, self.newest_run = version, "this run"
        self.spoil: Callable[[Sample], Sample] = lambda sample: sample
        self.error: Exception | None = None
        self.has_ended = False
        self.description = EngineDescription("e", "network", "tokenizer", (3,), 4096, slots, slots, False, "folder")
        self.port = 0

    def end(self, error):
        self.has_ended, self.error = True, error
        self.gate.set()

    async def open(self, seed, *, ahead=False):
        if self.has_ended:
            raise self.error
        await super().open(seed)
        return EngineSession(self, seed)

    def reset_prefix_cache(self):
        self.resets += 1

    def status(self):
        if self.has_ended:
            raise self.error
        return EngineStatus(self.version, checksums_of(self.version, self.run), self.progress, self.paused)

    async def look(self):
        self.version = max(self.newest, self.version)

    async def reload(self):
        self.reloads += 1
        self.version, self.run = self.newest, self.newest_run

    @contextlib.asynccontextmanager
    async def listening(self, port=0, token=TOKEN):
        self.description = dataclasses.replace(self.description, name=f"{id(self)}")
        socket = bind_port("127.0.0.1", port)
        socket.listen()
        self.port = socket.getsockname()[1]
        served = ServedEngine(self, self.description, self.status, self.look, self.reload)
        running = asyncio.create_task(EnginePort(served, token, socket).run())
        try:
            yield self
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def new_fleet(
    ports,
    config=None,
    version=0,
    begin=lambda *_: None,
    finish=lambda: None,
    required=REQUIRED,
    places=None,
    **options,
):
    """places: instead of the ports of this machine."""
    config = config or FleetConfig(patience_s=20)
    places = places or ListedEngines(tuple(f"127.0.0.1:{port}" for port in ports))
    publishing = Publishing(begin, finish)
    start = {"vocab_size": 500, "version": version, "checksums": checksums_of(version)}
    return FleetPolicy(places, TOKEN, required, config, publishing, **start, **options)
