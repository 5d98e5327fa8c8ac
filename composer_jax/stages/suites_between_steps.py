"""SuitesBetweenSteps: the suites of evaluate.every in a stage that trains on text, on a sampler made for them."""

from composer_jax.observe.progress import Progress
from composer_jax.parallel.processes import broadcast_from_process0, is_first_process
from composer_jax.sampler.engine import Sampler
from composer_jax.stages.periodic_evaluation import PeriodicEvaluation
from composer_jax.stages.rollout_workers import play_share
from composer_jax.stages.run import Run
from composer_jax.train.learner import TrainState


class SuitesBetweenSteps:
    """A StepEvaluation (train/loop.py): training waits while the suites play in all slots of the run's sampler.

    The sampler's copy of the weights and its cache are on the devices while suites play, and free between them. Every
    process must make one and call it at the same steps.
    """

    def __init__(self, run: Run, stage: str, periodic: PeriodicEvaluation) -> None:
        self._run, self._stage, self._periodic = run, stage, periodic
        self.truncate_after, self.is_due = periodic.truncate_after, periodic.is_due

    def run(self, step: int, state: TrainState) -> None:
        """See StepEvaluation.run."""
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
        services, slots = self._run.services, self._run.config.sampler.slots

        async def play() -> None:
            async with sampler.serving():
                on_done = lambda *_: progress.update()  # noqa: E731
                await self._periodic.play(step, step, sampler, context, workers.play, slots=slots, on_done=on_done)

        name = f"evaluate {self._stage.upper()} after step {step}"
        with services.episode_context() as (context, loop), Progress(episodes, "episode", name) as progress:
            workers = services.rollout_workers(context)
            loop.run(workers.serve(play()))
