"""Simulated roles for the orchestrator: an engine with slots, episodes of drawn lengths, and a learner of known speed.

Weights are one number, the version. Tokens of an episode are functions of its seed and of the version that samples.
"""

import asyncio
import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable

from composer_jax.agent.config import AgentConfig
from composer_jax.agent.episode import Episode
from composer_jax.agent.episode_clock import EpisodeClock, OutOfTime
from composer_jax.agent.episode_context import EpisodeContext, EpisodeSettings
from composer_jax.agent.summary import Compaction
from composer_jax.agent.transcript import Transcript
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.rl.config import RLConfig
from composer_jax.rl.group_source import GroupSource
from composer_jax.rl.learning_step import CompletedStep, Cursor
from composer_jax.rl.ledger import RolloutLedger
from composer_jax.rl.orchestrator import Learning, Orchestrator, Playing, Watchers
from composer_jax.rl.policy_update import UpdateResult
from composer_jax.sampler.policy import Sample
from composer_jax.seeds import hash_seed
from composer_jax.tasks.config import TasksConfig
from composer_jax.tasks.source import TaskSource
from composer_jax.train.learner import TrainState
from composer_jax.train.utilisation import Utilisation

AGENT = AgentConfig(compactions={"none": Compaction(None), "summary": Compaction(132)})
TASKS = TasksConfig(
    families={
        "bugfix": "composer_jax.demo.bugfix:Bugfix",
        "memory_chain": "composer_jax.demo.memory_chain:MemoryChain",
    }
)


LENGTHS = (5, 7)
"""Tokens of the rows that every step trains."""


@dataclasses.dataclass
class Play:
    """What becomes of one attempt at an episode."""

    turns: int = 3
    turn_s: float = 1.0
    fault: str = ""
    """"lost": the sandboxes die; "raises": the harness has a bug; "hangs": it never ends."""


class SimulatedSession:
    def __init__(self, policy, seed):
        self.policy, self.seed, self.max_model_len = policy, seed, 4096

    async def sample(self, context, params, branch=0):
        await self.policy.running.wait()
        await asyncio.sleep(self.policy.play_of(self.seed).turn_s)
        token = random.Random(hash_seed("token", self.seed, len(context))).randrange(100)
        self.policy.decoded_tokens += 2
        return Sample([token, self.policy.version], [-0.5, -0.5], [self.policy.version] * 2, "stop")

    def close(self):
        self.policy.open_sessions -= 1
        self.policy.free.release()


class SimulatedPolicy:
    """Sleeps while it decodes; a pause holds all episodes up. play_of: seed of an attempt -> Play."""

    def __init__(self, play_of, slots=10_000):
        self.play_of, self.slots, self.version, self.installed = play_of, slots, -1, []
        self.busy_seconds, self.decoded_tokens, self.open_sessions, self.resets = 0.0, 0, 0, 0

    @contextlib.asynccontextmanager
    async def serving(self):
        self.free, self.running = asyncio.Semaphore(self.slots), asyncio.Event()
        self.running.set()
        yield self
        assert self.open_sessions == 0, "an episode has left its session open"

    async def open(self, seed, *, ahead=False):
        await self.free.acquire()
        self.open_sessions += 1
        return SimulatedSession(self, seed)

    async def update_serving(self, params, router_bias, version, *, mode, checksums):
        assert params == version
        self.version = version
        self.installed.append(version)

    def reset_prefix_cache(self):
        assert self.open_sessions == 0, "running episodes would compute their contexts again"
        self.resets += 1

    async def pause(self, *, will_resume):
        self.running.clear()

    def resume(self):
        self.running.set()


def simulated_harness(policy: SimulatedPolicy):
    """A function in place of agent.episode.run_episode."""

    async def run_episode(spec, session, context):
        task, seed = spec.task, spec.seed
        play, transcript = policy.play_of(seed), Transcript()
        transcript.append("prompt", [1, 2, 3])
        if play.fault == "hangs":
            try:
                async with EpisodeClock(context.settings.episode_seconds).running():
                    await asyncio.Event().wait()
            except OutOfTime:
                return Episode(task.id, task.family, task.split, seed, transcript, 0.0, "out_of_time")
        for _ in range(play.turns):
            sample = await session.sample([*transcript.tokens, 5], SamplingParams(2))
            if play.fault == "raises":
                raise ZeroDivisionError("a bug of the harness")
            transcript.append("assistant", [5], sample.tokens, sample.logprobs, sample.versions)
        reward = None if play.fault == "lost" else float(random.Random(seed).random() < 0.5)
        outcome = "infrastructure" if reward is None else "finished"
        return Episode(task.id, task.family, task.split, seed, transcript, reward, outcome, turns=play.turns)

    return run_episode


class SimulatedUpdate:
    """A PolicyUpdate that adds one to the version; a step takes `seconds` of the virtual clock."""

    def __init__(self, seconds=0.0):
        self.step = functools.partial(self._step)
        self.step.seconds = seconds

    def _step(self, state, groups, episodes, step):
        return TrainState(state.params + 1, {}, {}, state.step + 1), UpdateResult(
            True, {"trained_tokens": 1.0}, lengths=LENGTHS
        )


@dataclasses.dataclass
class Simulation:
    """One RL run of simulated roles in a folder; `run` goes on from the last checkpoint of an earlier one."""

    folder: object
    config: RLConfig
    play_of: Callable[[int], Play]
    learn_s: float = 0.0
    slots: int = 10_000
    shares_devices: bool = False
    episode_seconds: float | None = None
    evaluate: Callable | None = None
    """(policy, step, version) -> an awaitable, as Watchers.evaluate."""
    save_every: int = 4
    utilisation: Utilisation | None = None
    new_weight_check: Callable[[SimulatedPolicy], object] = lambda policy: None
    checkpoint: Cursor = dataclasses.field(default_factory=Cursor)
    rows: dict = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    ended: int = 0
    decoded_tokens: int = 0

    def batches(self) -> list:
        with RolloutLedger(self.folder) as ledger:
            return list(ledger.batches)

    async def run(self, monkeypatch, kill_at: float | None = None) -> "Simulation":
        """kill_at: seconds after which everything stops where it is, as by kill -9: no checkpoint is written."""
        from composer_jax.rl import rollout

        policy, update = SimulatedPolicy(self.play_of, self.slots), SimulatedUpdate(self.learn_s)
        monkeypatch.setattr(rollout, "run_episode", simulated_harness(policy))
        cursor = self.checkpoint
        policy.version = cursor.weight_version
        self.update, self.policy = update, policy
        context = EpisodeContext(None, None, EpisodeSettings(episode_seconds=self.episode_seconds))
        config = dataclasses.replace(self.config, rollout_devices=0 if self.shares_devices else 1)
        state = TrainState(cursor.weight_version, {}, {}, cursor.optimizer_step)
        evaluate = self.evaluate and functools.partial(self.evaluate, policy)
        watchers = Watchers(self._save, self._count, evaluate, self.new_weight_check(policy))
        with RolloutLedger(self.folder) as ledger:
            orchestrator = Orchestrator(
                config,
                GroupSource(config, AGENT, 0, TaskSource(0, TASKS)),
                Learning(update, state, cursor, self.utilisation),
                Playing(policy, context),
                ledger,
                watchers,
            )
            self.orchestrator = orchestrator
            began = asyncio.get_running_loop().time()
            task = asyncio.create_task(orchestrator.run())
            if kill_at is not None:
                await asyncio.wait([task], timeout=kill_at)
                self._is_killed = True
                if not task.done():
                    task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                pass
            self._is_killed = False
            self.decoded_tokens += policy.decoded_tokens
            self.seconds = asyncio.get_running_loop().time() - began
        return self

    _is_killed = False

    def _count(self, episode):
        self.ended += 1

    def _save(self, completed: CompletedStep) -> None:
        if self._is_killed:
            return
        if completed.step not in self.rows:
            self.rows[completed.step] = completed.row
        if completed.step % self.save_every == 0:
            ledger = self.orchestrator.ledger
            ledger.forget(number for batch in ledger.batches[: completed.step] for number in batch.groups)
            self.checkpoint = self.orchestrator.cursor


def drawn_play(seed: int, *, faults: float = 0.0, kinds=("lost", "raises", "hangs")) -> Play:
    """A long-tailed length, and each kind of fault with the probability `faults`; a function of the attempt's seed."""
    rng = random.Random(hash_seed("play", seed))
    turns = 1 + min(60, int(rng.paretovariate(1.3)))
    draw, fault = rng.random(), ""
    for i, kind in enumerate(kinds):
        if draw < (i + 1) * faults and not fault:
            fault = kind
    return Play(turns, rng.uniform(0.5, 1.5), fault)
