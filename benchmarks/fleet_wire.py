"""What a message costs a learner whose engines are scripted, in bytes and CPU seconds: a part of benchmarks.fleet."""

import asyncio
import contextlib
import dataclasses
import tempfile
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fleet_engines import (
    EXPERTS_PER_TOKEN,
    LAYERS,
    VOCABULARY,
    EngineScript,
    scripted_engines,
)
from benchmarks.fleet_relay import relaying
from composer_jax.agent.episode import Episode
from composer_jax.agent.transcript import Transcript
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.frames import encode_frame
from composer_jax.rl.engines.fleet import FleetPolicy
from composer_jax.rl.group_player import GroupPlayer
from composer_jax.rl.sample_journal import SampleJournal
from composer_jax.rl.workers.messages import sample_to_frame
from composer_jax.sampler.policy import Sample, Session
from composer_jax.sampler.sequence import token_array

ROUTE_BYTES = LAYERS * EXPERTS_PER_TOKEN * 2


async def all_engines(fleet: FleetPolicy) -> None:
    """Waits until all engines of a serving fleet have the newest weights."""
    while fleet.metrics()["engines_newest"] < max(len(fleet.router.links), 1):
        await asyncio.sleep(0.01)


@dataclasses.dataclass(frozen=True)
class Messages:
    """The messages of every session."""

    count: int = 10
    prompt: int = 4000
    observation: int = 250
    """Tokens that each message but the first finds new in its context."""
    sampled: int = 250
    """Tokens of a message."""

    def draw(self, seed: int) -> "list[array[int]]":
        """Returns the tokens of the prompt, and those that follow each message."""
        rng = np.random.default_rng(seed)
        lengths = self.prompt, *[self.observation] * self.count
        return [token_array(rng.integers(1, VOCABULARY, length).tolist()) for length in lengths]

    async def play(self, session: Session, drawn: "list[array[int]]", *, routes: bool) -> list[Sample]:
        """Samples them, one after another; returns them. The first of `drawn` becomes the whole context."""
        (context, *observations), known, samples = drawn, 0, []
        for observation in observations:
            params = SamplingParams(self.sampled, return_routing=routes, routing_start=known if routes else 0)
            sample = await session.sample(context, params)
            known = len(context) + len(sample.tokens) - 1
            context.extend(sample.tokens)
            context.extend(observation)
            samples.append(sample)
        return samples


@dataclasses.dataclass(frozen=True)
class RoutedSession:
    """One episode of the measurement of the router."""

    group: int
    seed: int


async def _route(
    fleet: FleetPolicy, folder: Path, sessions: int, group_size: int, messages: Messages, routes: bool
) -> dict[str, float]:
    journal, connected = SampleJournal(folder), asyncio.Event()
    drawn, opened = {seed: messages.draw(seed) for seed in range(sessions)}, 0

    async def play(spec: Any) -> Episode:
        nonlocal opened
        policy = journal.recorded(fleet.of_version(0), spec.group)
        session = await policy.open(spec.seed)
        opened += 1
        if opened == sessions:
            connected.set()
        await connected.wait()
        await messages.play(session, drawn.pop(spec.seed), routes=routes)
        session.close()
        return Episode("", "", "train", spec.seed, Transcript(), 0.0, "finished")

    async def store(number: int, episodes: Sequence[Episode]) -> None:
        journal.forget(number)

    async with fleet.serving(), GroupPlayer(play, store) as player:
        await all_engines(fleet)
        cpu, started = time.process_time(), time.perf_counter()
        for group in range(sessions // group_size):
            seeds = range(group * group_size, (group + 1) * group_size)
            player.start(group, [RoutedSession(group, seed) for seed in seeds])  # type: ignore[misc]
        while player.playing:
            await player.change()
        count = sessions * messages.count
        cpu, seconds = time.process_time() - cpu, time.perf_counter() - started
    assert not fleet.resampled
    return {"ms": round(1e3 * cpu / count, 4), "messages": count, "messages_per_s": round(count / seconds, 1)}


def measure_router(
    sessions: int = 1024,
    engines: int = 8,
    group_size: int = 8,
    messages: Messages = Messages(),
    *,
    routes: bool = False,
) -> dict[str, float]:
    """Returns CPU milliseconds of the learner's process per message, with all sessions open at once.

    All is in it that happens between a session's request and its answer, and the opening and closing of sessions: the
    groups' tasks, the journal on disk, router, checks, codec and channels.

    routes: whether messages have routes of K2.5's size, whose bytes are then most of the work.
    """
    script = EngineScript(slots=sessions // engines)
    with scripted_engines(script, 1, engines) as running, tempfile.TemporaryDirectory() as folder:
        fleet = running.fleet(script, routes=routes)
        return asyncio.run(_route(fleet, Path(folder), sessions, group_size, messages, routes))


def measure_route_bytes(tokens: int = 500) -> dict[str, float]:
    """Returns the bytes of a message of so many new tokens with K2.5's routes on every hop, over those of its routes.

    All new tokens are sampled ones, which have log-probabilities and versions; observations take less.
    """
    script = EngineScript()
    messages = Messages(count=2, prompt=1000, observation=0, sampled=tokens)
    replies: list[int] = []
    requests: list[int] = []

    def watch(connection: int, is_of_learner: bool, header: dict[str, Any], n: int) -> None:
        if header.get("method") == "sample":
            requests.append(n)
        elif "finish_reason" in header.get("body", {}):
            replies.append(n)

    async def measure(folder: Path) -> dict[str, float]:
        async with contextlib.AsyncExitStack() as stack:
            port = await stack.enter_async_context(relaying(0, running.ports[0], watch))
            fleet = await stack.enter_async_context(running.fleet(script, routes=True, ports=[port]).serving())
            session = await SampleJournal(folder).recorded(fleet, 0).open(1)
            samples = await messages.play(session, messages.draw(1), routes=True)
            session.close()
        header, arrays = sample_to_frame(samples[1])
        worker = len(encode_frame({"reply": 1, "body": header}, arrays))
        (file,) = [path for path in folder.rglob("*") if path.is_file()]
        ideal = tokens * ROUTE_BYTES
        assert samples[1].routing is not None and samples[1].routing.nbytes == ideal
        return {
            "engine_to_learner": round(replies[1] / ideal, 5),
            "learner_to_worker": round(worker / ideal, 5),
            "journal": round((file.stat().st_size - replies[0]) / ideal, 5),
            "learner_to_engine": round(requests[1] / ideal, 5),
        }

    with scripted_engines(script, 1) as running, tempfile.TemporaryDirectory() as folder:
        hops = asyncio.run(measure(Path(folder)))
    return {"route_bytes_per_token": max(hops.values()), **hops}
