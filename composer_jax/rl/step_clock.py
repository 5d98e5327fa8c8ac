"""StepClock: what a step of RL spends, as columns of its row of metrics."""

import dataclasses
import time
from typing import Self

from composer_jax.observe.compilations import count_compilations
from composer_jax.sampler.policy import TrainablePolicy
from composer_jax.tasks.result_cache import ResultCache


@dataclasses.dataclass(frozen=True)
class StepClock:
    """The readings at the beginning of a step."""

    began: float
    """Of time.perf_counter, in seconds."""
    busy: float
    """Seconds for which the policy had computed."""
    runs: int
    """Commands that had run in a sandbox."""
    hits: int
    """Commands whose result had come from the cache."""
    compilations: int

    @classmethod
    def start(cls, policy: TrainablePolicy, cache: ResultCache) -> Self:
        return cls(time.perf_counter(), policy.busy_seconds, cache.runs, cache.hits, count_compilations())

    def read(self, policy: TrainablePolicy, cache: ResultCache, train_s: float) -> dict[str, float]:
        """Returns the columns of what was spent since the start; seconds that overlap count in each of their columns.

        train_s: seconds that the learner computed.
        """
        now = StepClock.start(policy, cache)
        step_s, rollout_s = now.began - self.began, now.busy - self.busy
        return {
            "sandbox_runs": now.runs - self.runs,
            "sandbox_hits": now.hits - self.hits,
            "rollout_s": rollout_s,
            "sandbox_s": max(0.0, step_s - rollout_s - train_s),
            "train_s": train_s,
            "step_s": step_s,
            "compilations": now.compilations - self.compilations,
        }
