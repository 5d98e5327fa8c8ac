"""Engines in processes of their own whose speed is scripted, on the real wire: a part of benchmarks.fleet."""

import asyncio
import contextlib
import dataclasses
import multiprocessing
from collections.abc import Iterator
from typing import Any

import numpy as np

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.rl.engines.config import FleetConfig
from composer_jax.rl.engines.description import EngineDescription, EngineStatus, RequiredEngine
from composer_jax.rl.engines.engine_places import ListedEngines
from composer_jax.rl.engines.engine_port import EnginePort, ServedEngine, bind_port
from composer_jax.rl.engines.fleet import FleetPolicy, Publishing
from composer_jax.sampler.policy import Sample
from composer_jax.sampler.weight_checksums import WeightChecksum

LAYERS, EXPERTS_PER_TOKEN, EXPERTS = 60, 8, 384
"""Of the routes of Kimi K2.5."""
VOCABULARY = 160_000
TOKEN = "a token of the benchmark of fleets"
SILENCE_S = 600.0
"""Seconds after which an engine is lost: a machine with other work may hold a process up for the 30 of a run."""


@dataclasses.dataclass(frozen=True)
class EngineScript:
    """How a scripted engine samples."""

    slots: int = 16
    """Messages at once."""
    tokens_per_s: float = 0.0
    """Of each message; 0 answers at once."""
    max_model_len: int = 32_768


def required_engine(script: EngineScript, *, routes: bool) -> RequiredEngine:
    """Returns what a learner needs of scripted engines."""
    shape = (LAYERS, EXPERTS_PER_TOKEN) if routes else None
    return RequiredEngine("network", "tokenizer", (0,), script.max_model_len, shape, EXPERTS)


def checksums_of(version: int) -> tuple[WeightChecksum, ...]:
    """Returns the checksums of the weights of a version, which are made up."""
    return (WeightChecksum("w", "bfloat16", (3,), str(version)),)


class ScriptedPolicy:
    """A policy whose tokens are drawn from each session's seed, and whose messages have max_tokens tokens."""

    def __init__(self, script: EngineScript, published: Any) -> None:
        """published: a multiprocessing.Value of the version that the learner has published."""
        self.script, self._published, self.version, self.progress = script, published, published.value, 0
        self.free = asyncio.Semaphore(script.slots)
        rng = np.random.default_rng(0)
        self.routes = rng.integers(0, EXPERTS, (script.max_model_len, LAYERS, EXPERTS_PER_TOKEN), np.uint16)
        self.logprobs = (-rng.exponential(0.3, script.max_model_len)).astype(np.float32).tolist()

    async def open(self, seed: int, *, ahead: bool = False) -> "ScriptedSession":
        """See Policy.open."""
        return ScriptedSession(self, seed)

    def reset_prefix_cache(self) -> None:
        """Does nothing, because nothing is cached."""

    def status(self) -> EngineStatus:
        """See ServedEngine.status."""
        return EngineStatus(self.version, checksums_of(self.version), self.progress)

    async def look(self) -> None:
        """Has the version that the learner published last."""
        self.version = self._published.value


class ScriptedSession:
    """A Session of a ScriptedPolicy."""

    def __init__(self, policy: ScriptedPolicy, seed: int) -> None:
        self.max_model_len = policy.script.max_model_len
        self._policy, self._seed = policy, seed

    async def sample(self, context: Any, params: SamplingParams, branch: int = 0) -> Sample:
        """See Session.sample."""
        policy, n, length = self._policy, params.max_tokens, len(context)
        async with policy.free:
            if policy.script.tokens_per_s:
                await asyncio.sleep(n / policy.script.tokens_per_s)
            policy.progress += n
        tokens = np.random.default_rng([self._seed, branch, length]).integers(1, VOCABULARY, n).tolist()
        logprobs, end = policy.logprobs[:n], length + n - 1
        routing = policy.routes[params.routing_start : end] if params.return_routing else None
        versions = [policy.version] * n
        start = params.routing_start
        return Sample(tokens, logprobs, versions, "length", logprobs, routing=routing, routing_start=start)

    def close(self) -> None:
        """Does nothing."""


async def _serve(script: EngineScript, engines: int, published: Any, ports: Any) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(engines):
            policy, socket = ScriptedPolicy(script, published), bind_port("127.0.0.1", 0)
            slots, longest = script.slots, script.max_model_len
            what = EngineDescription(f"{number}", "network", "tokenizer", (0,), longest, slots, slots, True, "folder")
            port = EnginePort(ServedEngine(policy, what, policy.status, policy.look, policy.look), TOKEN, socket)
            group.create_task(port.run())
            socket.listen()
            ports.put(socket.getsockname()[1])


def _run(script: EngineScript, engines: int, published: Any, ports: Any) -> None:
    asyncio.run(_serve(script, engines, published, ports))


class ScriptedEngines:
    """Engines that run. published: the version that they take when they look."""

    def __init__(self, ports: list[int], published: Any) -> None:
        self.ports, self.published = ports, published

    def fleet(self, script: EngineScript, *, routes: bool, ports: list[int] | None = None) -> FleetPolicy:
        """Returns a policy on these engines, whose weights only have a version. ports: other ones that lead there."""
        versions = [self.published.value]

        def begin(params: Any, router_bias: Any, version: int) -> None:
            versions.append(version)

        def finish() -> None:
            self.published.value = versions[-1]

        return FleetPolicy(
            ListedEngines(tuple(f"127.0.0.1:{port}" for port in ports or self.ports)),
            TOKEN,
            required_engine(script, routes=routes),
            FleetConfig(silence_s=SILENCE_S, stall_s=SILENCE_S),
            Publishing(begin, finish),
            vocab_size=VOCABULARY,
            version=versions[0],
            checksums=checksums_of(versions[0]),
        )


@contextlib.contextmanager
def scripted_engines(script: EngineScript, processes: int, engines_each: int = 1) -> Iterator[ScriptedEngines]:
    """Runs engines in processes of their own inside the block."""
    context = multiprocessing.get_context("spawn")
    published, ports = context.Value("q", 0), context.Queue()
    arguments = script, engines_each, published, ports
    running = [context.Process(target=_run, args=arguments, daemon=True) for _ in range(processes)]
    for process in running:
        process.start()
    try:
        yield ScriptedEngines([ports.get(timeout=300) for _ in range(processes * engines_each)], published)
    finally:
        for process in running:
            process.kill()
            process.join()
