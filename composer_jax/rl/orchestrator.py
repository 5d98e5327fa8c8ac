"""Orchestrator: Tasks -> Episodes -> Groups -> Batches -> Params. The only place where the roles meet.

One number, rl.max_staleness, says how far playing runs ahead of learning: with 0 they alternate, with 1 the next batch
plays while this one trains, and beyond that weights change under running episodes. Groups are the unit: a group is
trained when its episodes have ended (rl/group_buffer.py).
"""

import asyncio
import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Self, TypeVar

from composer_jax.agent.episode import Episode
from composer_jax.agent.episode_context import EpisodeContext
from composer_jax.errors import UserError
from composer_jax.rl.config import RLConfig
from composer_jax.rl.curriculum import FamilyResults, rung_metrics
from composer_jax.rl.group_buffer import GroupBuffer
from composer_jax.rl.group_player import GroupPlayer
from composer_jax.rl.group_source import GroupSource
from composer_jax.rl.learning_step import CompletedStep, Cursor, complete_step, learner_arguments
from composer_jax.rl.ledger import BatchRecord, RolloutLedger
from composer_jax.rl.played_group import PlayedGroup
from composer_jax.rl.policy_update import GroupLearner
from composer_jax.rl.rollout import PlayEpisode, play_episode, require_graded
from composer_jax.rl.step_clock import StepClock
from composer_jax.rl.weight_check import WeightCheck
from composer_jax.sampler.policy import Policy, TrainablePolicy
from composer_jax.sampler.weight_checksums import WeightChecksums
from composer_jax.train.learner import TrainState
from composer_jax.train.utilisation import Utilisation

T = TypeVar("T")

Evaluate = Callable[[int, int], Awaitable[None]]
"""(completed step, version of its weights) -> plays whatever is due after that step on the policy that serves them."""


@dataclasses.dataclass(frozen=True)
class _LearnedStep:
    """A step whose weights the policy does not have yet."""

    completed: CompletedStep
    """Without the columns of the row that are known when the policy has the weights."""
    checksums: WeightChecksums | None
    train_s: float
    """Seconds that the learner computed."""


@dataclasses.dataclass(frozen=True)
class Learning:
    """What learns, and where it goes on: the weights and the position of the latest checkpoint."""

    learner: GroupLearner
    state: TrainState
    cursor: Cursor
    utilisation: Utilisation | None = None
    """Gives the rows their mfu; None where the peak of the devices is not known."""


@dataclasses.dataclass(frozen=True)
class Playing:
    """What plays the groups."""

    policy: TrainablePolicy
    context: EpisodeContext
    """What episodes need; its cache counts the sandbox runs of all of them."""
    play: PlayEpisode | None = None
    """Plays an episode of a policy, as on the workers of rl/workers; None plays it in this process."""
    of_version: Callable[[int], Policy] | None = None
    """Returns the part of `policy` with a weight version or later ones, from which the groups sample that are admitted
    at this version; None where all of `policy` has the weights of update_serving."""


@dataclasses.dataclass(frozen=True)
class Watchers:
    """What is told of the steps and the episodes of a run, and what measures its weights between them."""

    on_step: Callable[[CompletedStep], None]
    """Called in a thread after each step, before the next one begins; it may save Orchestrator.state."""
    on_episode: Callable[[Episode], None] | None = None
    """Called as each episode ends."""
    evaluate: Evaluate | None = None
    """Measures the policy after each step, and at the beginning what an earlier process did not measure. The weights
    stay until it has ended; it is cancelled if the run ends otherwise."""
    weight_check: WeightCheck | None = None
    """Measures at the beginning and every rl.weight_check_every steps; None never does."""


class PinnedEvaluation:
    """Measures the weights that the policy serves, while it goes on to play training episodes.

    Whoever installs other weights awaits `end` first. An asynchronous context manager; leaving it cancels an evaluation
    that runs.
    """

    def __init__(self, evaluate: Evaluate | None) -> None:
        """evaluate: None measures nothing."""
        self._evaluate = evaluate
        self._task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether an evaluation has begun and not ended."""
        return self._task is not None and not self._task.done()

    async def start(self, step: int, version: int) -> None:
        """Begins what is due after a step; returns without waiting for its end. The one before has ended."""
        assert not self.is_running, "the weights of a running evaluation were replaced"
        if self._evaluate is not None:
            self._task = asyncio.ensure_future(self._evaluate(step, version))
            await asyncio.sleep(0)  # its episodes ask for sessions before those of training that start now

    async def end(self) -> None:
        """Waits until the evaluation has ended. Raises what it raised."""
        if self._task is not None:
            await self._task

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)  # its episodes return their sandboxes


class Orchestrator:
    """One RL run.

    state, cursor: weights and position after the last completed step. A step donates its state: they can be saved only
    while `is_consistent`.
    """

    def __init__(
        self,
        config: RLConfig,
        source: GroupSource,
        learning: Learning,
        playing: Playing,
        ledger: RolloutLedger,
        watchers: Watchers,
    ):
        """The policy pauses while the learner computes, unless it has devices of its own (rl.rollout_devices)."""
        self.config, self.source = config, source
        self.learner, self.policy, self.ledger = learning.learner, playing.policy, ledger
        self._utilisation = learning.utilisation
        self.state, self.cursor, self.is_consistent = learning.state, learning.cursor, True
        self._on_step, self._weight_check = watchers.on_step, watchers.weight_check
        self._shares_devices = config.samples_here and config.rollout_devices == 0
        self._of_version = playing.of_version
        self._admission_versions: dict[int, int] = {}
        play = playing.play or functools.partial(play_episode, context=playing.context)
        self.player = GroupPlayer(
            lambda spec: play(spec, ledger.samples.recorded(self._policy_of(spec.group), spec.group)),
            self._store,
            watchers.on_episode,
        )
        self.evaluation = PinnedEvaluation(watchers.evaluate)
        self._played: dict[int, PlayedGroup] = {}
        self._cache = playing.context.cache
        self.buffer = GroupBuffer(
            source.groups_per_step,
            config.steps,
            config.max_staleness,
            late_groups=config.late_groups,
            in_order=config.deterministic,
            step=self.cursor.task_step,
        )
        self._backlog: list[int] = []
        self._served_version = self.cursor.weight_version
        self._recover()

    async def run(self) -> None:
        """Plays and learns until all steps are taken. Cancelling it completes a step that learns already.

        The policy holds the weights of `state` when it is called.
        """
        async with self.policy.serving(), self.player, self.evaluation:
            gap = None
            if self._weight_check is not None:
                gap = await self._on_devices(self._measure_gap(self._weight_check))
            clock = await self._evaluate(self._start_clock())
            while self.buffer.step < self.config.steps:
                clock = await self._take_step(clock, gap)
                gap = None  # it is in the row of the first step
            await self.evaluation.end()

    async def _take_step(self, clock: StepClock, gap: float | None) -> StepClock:
        """Takes one step: plays its groups, learns from them, gives the policy the weights and records the step.

        Where an evaluation or a deterministic run needs the old weights longer, what plays with them ends first.

        Args:
          clock: started when the step before ended.
          gap: of the weights that the step starts from, if it was measured and is in no row yet.

        Returns:
          The clock of the next step.
        """
        self._admit()
        groups = await self._next_batch()
        if self._shares_devices:
            await self.evaluation.end()  # learning takes its devices
        if self.config.deterministic or self.evaluation.is_running:
            learned = await self._on_devices(self._learn(groups))
            while self.config.deterministic and self.player.playing:
                await self.player.change()
            await self.evaluation.end()
            clock = await self._on_devices(self._publish(learned, clock, gap))
        else:
            clock = await self._on_devices(self._learn_and_publish(groups, clock, gap))
        return await self._evaluate(clock)

    # -- what is played ------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Takes over what an earlier process admitted: stored groups are resolved, the others play again."""
        self.source.restore(self.ledger.places)
        for number in self.ledger.recover(self.cursor.task_step):
            if self.ledger.has(number):
                self.buffer.admit(number, self.ledger.admitted[number])
                self.buffer.resolve(number)
            else:
                self._backlog.append(number)
        self.buffer.next_number = len(self.ledger.admitted)

    def _admit(self) -> None:
        """Starts the groups that may play now.

        A deterministic run plays a group with the weights of the step at which it was admitted first. Another run plays
        what an interrupt cut short when all recorded batches are trained again, with the newest weights.
        """
        is_repeating = len(self.ledger.batches) > self.buffer.step
        while self._backlog:
            number = self._backlog[0]
            if self.ledger.admitted[number] > self.buffer.step if self.config.deterministic else is_repeating:
                return
            self._start(self._backlog.pop(0))
        while self.buffer.can_admit and not is_repeating:
            self._start(self.buffer.next_number)

    def _start(self, number: int) -> None:
        """Plays a group. One that was cut short has the deadline that it had: its oldest tokens are that old."""
        step = min(self.ledger.admitted.get(number, self.buffer.step), self.buffer.step)
        self.ledger.admit(number, step, self.source.draw(number, self._results(self.buffer.step)))
        self.buffer.admit(number, step)
        self._admission_versions[number] = self._served_version
        self.player.start(number, self.source.specs(number))

    def _policy_of(self, group: int) -> Policy:
        """Returns what a group samples from. No token is older than the weights at which the group was admitted."""
        return self.policy if self._of_version is None else self._of_version(self._admission_versions[group])

    def _results(self, steps: int) -> list[FamilyResults]:
        return [record.families for record in self.ledger.batches[:steps]]

    async def _store(self, number: int, episodes: Sequence[Episode]) -> None:
        """Stores a group whose last episode has ended."""
        group = PlayedGroup(number, episodes, self.buffer.outstanding[number], self._served_version)
        await asyncio.to_thread(self.ledger.store, group)  # long transcripts take seconds to compress
        self._played[number] = group
        self._admission_versions.pop(number, None)
        self.buffer.resolve(number)

    async def _next_batch(self) -> list[PlayedGroup]:
        """Waits for the groups of the next step: those that batches.jsonl has for it, or what the buffer gives."""
        step = self.buffer.step
        recorded = self.ledger.batches[step].groups if step < len(self.ledger.batches) else None
        while (numbers := recorded or self.buffer.next_batch()) is None:
            await self.player.change()
        groups = [self._played.pop(number, None) or self.ledger.load(number) for number in numbers]
        try:
            require_graded([episode for group in groups for episode in group.episodes])
        except UserError:
            self.ledger.forget(numbers)  # so that the command plays them again
            raise
        return groups

    # -- what is learned -----------------------------------------------------------------------------------------

    async def _learn_and_publish(self, groups: Sequence[PlayedGroup], clock: StepClock, gap: float | None) -> StepClock:
        return await self._publish(await self._learn(groups), clock, gap)

    async def _learn(self, groups: Sequence[PlayedGroup]) -> _LearnedStep:
        step, version = self.cursor.task_step + 1, self.cursor.weight_version
        record = await asyncio.to_thread(BatchRecord.of, step, version, groups)  # hashes every row
        self.ledger.begin_step(record)
        self.is_consistent = False
        began = time.perf_counter()
        state, result = await asyncio.to_thread(
            self.learner.step, self.state, *learner_arguments(self.config, self.cursor, groups)
        )
        train_s = time.perf_counter() - began
        dropped = self.buffer.pop_batch(group.number for group in groups)
        for number in dropped:
            self.player.cancel(number)
            self.ledger.drop(number, self.buffer.step)
            self._played.pop(number, None)
            self._admission_versions.pop(number, None)
        completed = complete_step(self.config, self.cursor, groups, state, result, train_s, self._utilisation)
        self.state, self.cursor = state, completed.cursor
        row = completed.row | {
            "groups_queued": self.buffer.queued,
            "groups_playing": self.buffer.playing,
            "groups_dropped": len(dropped),
            **rung_metrics(self._results(step - 1), self.config.curriculum),
        }
        return _LearnedStep(dataclasses.replace(completed, row=row), result.checksums, train_s)

    async def _publish(self, learned: _LearnedStep, clock: StepClock, gap: float | None) -> StepClock:
        """Gives the policy the new weights and completes the step. Returns the clock of the next one."""
        completed, row = learned.completed, dict(learned.completed.row)
        if completed.is_updated:
            # Running episodes go on with what older weights computed, as in PipelineRL (arXiv 2509.19128).
            await self.policy.update_serving(
                completed.state.params,
                completed.state.router_bias,
                completed.cursor.weight_version,
                mode="keep",
                checksums=learned.checksums,
            )
            self._served_version = completed.cursor.weight_version
        if self._weight_check is not None:
            if completed.step % self.config.weight_check_every == 0:
                gap = await self._measure_gap(self._weight_check)
            row["weight_gap"] = gap
        row |= clock.read(self.policy, self._cache, learned.train_s)
        self.is_consistent = True
        await asyncio.to_thread(self._on_step, dataclasses.replace(completed, row=row))
        return self._start_clock()

    async def _evaluate(self, clock: StepClock) -> StepClock:
        """Begins to measure the weights that the policy serves now. Returns the clock of the next step.

        A deterministic run waits for the end before it admits groups. It forgets the cache after every step, evaluated
        or not, so that what an evaluation leaves there changes no bit of what is sampled next.
        """
        await self.evaluation.start(self.cursor.task_step, self.cursor.weight_version)
        if not self.config.deterministic:
            return clock
        await self.evaluation.end()
        self.policy.reset_prefix_cache()
        return self._start_clock()

    async def _measure_gap(self, check: WeightCheck) -> float:
        """Returns the gap of policy and learner, whose weights are the same version."""
        if not self._shares_devices:  # otherwise the policy is paused
            await self.policy.pause(will_resume=True)
        try:
            return await check.measure(self.state, self.cursor.weight_version)
        finally:
            if not self._shares_devices:
                self.policy.resume()

    async def _on_devices(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits `work` while the devices that it shares with the policy belong to it; sandboxes go on.

        If the caller is cancelled meanwhile, `work` is completed first.
        """

        async def pause_and_work() -> T:
            if self._shares_devices:
                await self.policy.pause(will_resume=True)
            try:
                return await work
            finally:
                if self._shares_devices:
                    self.policy.resume()

        return await _complete(pause_and_work())

    def _start_clock(self) -> StepClock:
        return StepClock.start(self.policy, self._cache)


async def _complete(work: Awaitable[T]) -> T:
    """Awaits `work`; if the caller is cancelled meanwhile, completes it first."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()):
            raise error from None
        raise
