"""PeriodicEvaluation: the suites of evaluate.every, played while a stage trains, at the weights after its steps.

SuitesBetweenSteps plays them in a stage that trains on text, on a sampler made for them.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Self

from composer_jax.agent.episode import Episode
from composer_jax.agent.episode_context import EpisodeContext
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.errors import UserError
from composer_jax.evals.pinned_policy import PinnedPolicy
from composer_jax.evals.suite import Suite, SuiteResult, run_suite
from composer_jax.event_loop import run_all
from composer_jax.observe.metrics import NoMetrics, read_metrics
from composer_jax.observe.progress import Progress
from composer_jax.parallel.processes import broadcast_from_process0, is_first_process
from composer_jax.rl.rollout import PlayEpisode, play_episode
from composer_jax.sampler.policy import Policy, TrainablePolicy
from composer_jax.sampler.sampler import Sampler
from composer_jax.stages.evaluate import suites
from composer_jax.stages.rollout_workers import play_share
from composer_jax.stages.run import Run
from composer_jax.tasks.result_cache import ResultCache
from composer_jax.train.learner import TrainState


class PeriodicEvaluation:
    """The suites of evaluate.every in one training stage. A context manager; process 0 plays and writes.

    A suite leaves a row in metrics/evaluate_STAGE.jsonl when it has ended: step, version (of the weights) and, each
    followed by _SUITE, pass_at_1, low and high (its 95 % interval over tasks), tokens (sampled in all episodes), lost
    (episodes that the infrastructure lost) and seconds. A suite whose row is there is not run again.
    """

    def __init__(self, run: Run, stage: str) -> None:
        """Raises UserError if evaluate.every names a suite of tasks.heldout that is not there."""
        config = self._config = run.config.evaluate
        self._every = config.every if stage in config.during else {}
        self._suites = _suites_of(run, self._every) if self._every and is_first_process() else {}
        self._metrics = run.metrics(f"evaluate_{stage}") if self._every else NoMetrics()
        self.truncate_after = self._metrics.truncate_after

    def is_due(self, step: int) -> bool:
        """Returns whether any suite is due after a step; equal in all processes."""
        return bool(self._due(step))

    def count_episodes(self, step: int) -> int:
        """Returns the number of episodes that `play` will play after a step."""
        return sum(len(suite.specs()) for suite in self._missing(step))

    def _due(self, step: int) -> list[str]:
        return [name for name, every in self._every.items() if step > 0 and step % every == 0]

    def _missing(self, step: int) -> list[Suite]:
        """Returns the suites that are due after a step and have no row of it."""
        if not (due := self._due(step)):
            return []
        columns = {column for row in read_metrics(self._metrics.path) if row["step"] == step for column in row}
        return [self._suites[name] for name in due if f"pass_at_1_{name}" not in columns]

    async def play(
        self,
        step: int,
        version: int,
        policy: TrainablePolicy,
        context: EpisodeContext,
        play: PlayEpisode | None,
        *,
        at_once: int | None,
        on_done: Callable[[int, int], None],
    ) -> None:
        """Plays the suites that are missing side by side, at the weights that `policy` serves, and writes their rows.

        Raises UserError if the infrastructure lost all episodes of a suite.

        Args:
          version: of these weights.
          context: what training episodes need; suites count what they run in sandboxes apart.
          play: plays an episode, as on workers; None plays it in this process.
          at_once: episodes that play at once, at most; None leaves it to `policy` and the sandboxes.
          on_done: called as each episode ends with the numbers of those that have ended and of all.
        """
        settings = dataclasses.replace(context.settings, return_routing=False)
        context = dataclasses.replace(context, settings=settings, cache=ResultCache())
        play_one = play or functools.partial(play_episode, context=context)
        free = contextlib.nullcontext() if at_once is None else asyncio.Semaphore(at_once)

        async def play_in_slot(spec: EpisodeSpec, policy: Policy) -> Episode:
            async with free:
                return await play_one(spec, policy)

        pinned = PinnedPolicy(policy, version, self._config.temperature)
        total, ended, began = self.count_episodes(step), itertools.count(1), time.perf_counter()

        async def play_suite(suite: Suite) -> None:
            result, _ = await run_suite(suite, pinned, context, lambda _: on_done(next(ended), total), play_in_slot)
            seconds = {f"seconds_{suite.name}": time.perf_counter() - began}
            self._metrics.write(step, version=version, **_columns(suite.name, result), **seconds)

        await run_all(play_suite(suite) for suite in self._missing(step))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._metrics.close()


def _suites_of(run: Run, names: Iterable[str]) -> dict[str, Suite]:
    known = suites(run, "after")
    for name in names:
        if name not in known:
            raise UserError(f"evaluate.every names the suite {name!r}; there are {', '.join(known) or 'none'}.")
    return {name: known[name] for name in names}


def _columns(name: str, result: SuiteResult) -> dict[str, float]:
    values = {
        "pass_at_1": result.pass_at_1,
        "low": result.low,
        "high": result.high,
        "tokens": round(result.sampled_tokens * result.episodes),
        "lost": result.infrastructure_failures,
    }
    return {f"{measure}_{name}": value for measure, value in values.items()}


class SuitesBetweenSteps:
    """A StepEvaluation (train/loop.py): training waits while the suites play on a sampler of the run's config.

    The sampler's copy of the weights and its cache are on the devices while suites play, and free between them. Every
    process must make one and call it at the same steps.
    """

    def __init__(self, run: Run, stage: str, periodic: PeriodicEvaluation) -> None:
        self._run, self._stage, self._periodic = run, stage, periodic
        self.truncate_after, self.is_due = periodic.truncate_after, periodic.is_due

    def run(self, step: int, state: TrainState) -> None:
        episodes = broadcast_from_process0(lambda: self._periodic.count_episodes(step))
        if not episodes:
            return
        sampler = self._run.services.sampler_with(state.params, state.router_bias, version=step)
        try:
            if is_first_process():
                self._play(step, episodes, sampler)
            else:
                with play_share(self._run.config.agent.concurrency):
                    sampler.follow()
        finally:
            sampler.release()

    def _play(self, step: int, episodes: int, sampler: Sampler) -> None:
        services = self._run.services

        async def play() -> None:
            async with sampler.serving():
                on_done = lambda *_: progress.update()  # noqa: E731
                await self._periodic.play(step, step, sampler, context, workers.play, at_once=None, on_done=on_done)

        name = f"evaluate {self._stage.upper()} after step {step}"
        with services.episode_context() as (context, loop), Progress(episodes, "episode", name) as progress:
            workers = services.rollout_workers(context)
            loop.run(workers.serve(play()))
