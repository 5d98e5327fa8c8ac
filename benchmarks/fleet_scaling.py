"""Samples per second of one, two and four scripted engines on the real wire: a part of benchmarks.fleet.

Orchestrator, ledger, journal and fleet are the real ones, every engine is a process of its own, and the learner of
known speed sleeps. A message has routes of K2.5's size. What an ideal fleet would sample follows from the scripted
speed.
"""

import asyncio
import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fleet_engines import (
    VOCABULARY,
    EngineScript,
    ScriptedEngines,
    checksums_of,
    scripted_engines,
)
from composer_jax.agent.config import AgentConfig
from composer_jax.agent.episode import Episode
from composer_jax.agent.episode_context import EpisodeContext, EpisodeSettings
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import Compaction
from composer_jax.agent.transcript import Transcript
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.rl.config import RLConfig
from composer_jax.rl.group_source import GroupSource
from composer_jax.rl.learning_step import CompletedStep, Cursor
from composer_jax.rl.ledger import RolloutLedger
from composer_jax.rl.orchestrator import Learning, Orchestrator, Playing, Watchers
from composer_jax.rl.policy_update import UpdateResult
from composer_jax.sampler.policy import Policy
from composer_jax.tasks.config import TasksConfig
from composer_jax.tasks.source import TaskSource
from composer_jax.train.learner import TrainState


@dataclasses.dataclass(frozen=True)
class ScalingLoad:
    """What the engines sample, and how fast they and the learner are."""

    engines: tuple[int, ...] = (1, 2, 4)
    slots: int = 8
    """Messages that an engine samples at once."""
    tokens_per_s: float = 200.0
    """Of each message: low enough that two cores carry the bytes of four engines."""
    message: tuple[int, int] = (300, 700)
    """Tokens of a message, from and to."""
    observation: int = 100
    messages: int = 4
    """Of an episode."""
    groups: int = 2
    """Of a step, of GROUP_SIZE episodes each."""
    learn_s: float = 1.5
    """Seconds of a step of the learner."""
    warm_s: float = 10.0
    measure_s: float = 40.0


GROUP_SIZE = 4
STALENESS = 8
"""Steps that playing runs ahead: enough episodes for the slots of four engines."""


class SleepingLearner:
    """A learner whose weights are their version."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def step(self, state: Any, groups: Sequence[Any], episodes: int, step: int) -> tuple[TrainState, UpdateResult]:
        """Sleeps; returns the next version."""
        time.sleep(self._seconds)
        version = state.params + 1
        result = UpdateResult(True, {"trained_tokens": 1.0}, lengths=(1,), checksums=checksums_of(version))
        return TrainState(version, {}, {}, state.step + 1), result


class _Run:
    """One run; counts what is sampled in its window."""

    def __init__(self, load: ScalingLoad) -> None:
        self.load, self.tokens, self.messages = load, 0, 0
        self.rows: list[dict[str, Any]] = []

    async def play(self, spec: EpisodeSpec, policy: Policy) -> Episode:
        """Plays an episode of messages of drawn lengths."""
        load, rng = self.load, np.random.default_rng(spec.seed)
        session, transcript = await policy.open(spec.seed), Transcript()
        observation = rng.integers(1, VOCABULARY, load.observation)
        transcript.append("prompt", rng.integers(1, VOCABULARY, 1000))
        try:
            for _ in range(load.messages):
                n = int(rng.integers(*load.message))
                params = SamplingParams(n, return_routing=True, routing_start=transcript.routes_known)
                sample = await session.sample([*transcript.tokens, *observation.tolist()], params)
                self.tokens += n
                self.messages += 1
                transcript.append(
                    "assistant",
                    observation,
                    sample.tokens,
                    sample.logprobs,
                    sample.versions,
                    routes=sample.routing,
                    routes_start=sample.routing_start,
                )
        finally:
            session.close()
        task, reward = spec.task, float(rng.random() < 0.5)
        return Episode(task.id, task.family, task.split, spec.seed, transcript, reward, "finished", turns=load.messages)

    async def measure(self, engines: ScriptedEngines, folder: str) -> dict[str, float]:
        """Runs until the window has ended."""
        load = self.load
        fleet = engines.fleet(EngineScript(load.slots), routes=True)
        config = RLConfig(
            steps=10_000,
            groups={"bugfix": load.groups},
            group_size=GROUP_SIZE,
            max_staleness=STALENESS,
            engines=tuple(f"127.0.0.1:{port}" for port in engines.ports),
            publish="weights",
        )
        tasks = TaskSource(0, TasksConfig(families={"bugfix": "composer_jax.demo.bugfix:Bugfix"}))
        agent = AgentConfig(compactions={"summary": Compaction(None)})
        context = EpisodeContext(None, None, EpisodeSettings())  # type: ignore[arg-type]
        learning = Learning(SleepingLearner(load.learn_s), TrainState(0, {}, {}, 0), Cursor())  # type: ignore[arg-type]
        playing = Playing(fleet, context, self.play, fleet.of_version)
        with RolloutLedger(Path(folder)) as ledger:
            watchers = Watchers(self._note)
            source = GroupSource(config, agent, 0, tasks)
            orchestrator = Orchestrator(config, source, learning, playing, ledger, watchers)
            running = asyncio.create_task(orchestrator.run())
            try:
                await asyncio.wait([running], timeout=load.warm_s)
                before, rows, cpu, started = self.tokens, len(self.rows), time.process_time(), time.perf_counter()
                messages = self.messages
                await asyncio.wait([running], timeout=load.measure_s)
                seconds = time.perf_counter() - started
            finally:
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running
        tokens, messages, cpu = self.tokens - before, self.messages - messages, time.process_time() - cpu
        steps = self.rows[rows:]
        idle = 1 - sum(row["train_s"] for row in steps) / max(1e-9, sum(row["step_s"] for row in steps))
        ideal = len(engines.ports) * load.slots * load.tokens_per_s
        return {
            "samples_per_s": round(messages / seconds, 3),
            "over_ideal": round(tokens / seconds / ideal, 4),
            "learner_idle": round(idle, 3),
            "learner_cpu": round(cpu / seconds, 3),
            "mb_per_s": round(tokens / seconds * 960 / 1e6, 2),
            "steps": len(steps),
        }

    def _note(self, completed: CompletedStep) -> None:
        self.rows.append(dict(completed.row))


def measure_scaling(load: ScalingLoad = ScalingLoad()) -> dict[str, Any]:
    """Returns {engines: {"samples_per_s", "over_ideal", "learner_idle", "learner_cpu", "mb_per_s"}} and the worst.

    over_ideal: sampled tokens per second over engines x slots x tokens per second. learner_idle: share of a step in
    which the learner waits. learner_cpu: busy cores of the learner's process.
    """
    out: dict[str, Any] = {}
    for count in load.engines:
        script = EngineScript(load.slots, load.tokens_per_s)
        with scripted_engines(script, count) as engines, tempfile.TemporaryDirectory() as folder:
            out[str(count)] = asyncio.run(_Run(load).measure(engines, folder))
    return {"engine_scaling": min(one["over_ideal"] for one in out.values()), "by_engines": out}
