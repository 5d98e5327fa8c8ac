"""A suite: tasks, attempts at each, a compaction setting; and what comes out of running it."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from composer_jax.agent.episode import Episode
from composer_jax.agent.summary import Compaction
from composer_jax.evals.pass_at_k import pass_at_k
from composer_jax.rl.rollout import Environment, Job, roll_out
from composer_jax.sampler.policy import Policy
from composer_jax.seeds import hash_seed
from composer_jax.tasks.task import Task


@dataclasses.dataclass(frozen=True)
class Suite:
    name: str
    tasks: Sequence[Task]
    attempts: int
    compaction: Compaction
    seed: int = 0

    def jobs(self) -> list[Job]:
        """Attempt i at a task draws the same random numbers whatever policy or other suite it is part of."""
        return [
            Job(task, hash_seed("evaluation", self.seed, task.id, attempt), self.compaction)
            for task in self.tasks
            for attempt in range(self.attempts)
        ]


@dataclasses.dataclass(frozen=True)
class SuiteResult:
    """Means over graded episodes; infrastructure failures are counted apart and never score."""

    pass_at_1: float
    pass_at_k: float
    """At least one of `attempts` attempts solves the task; tasks with fewer graded attempts count with those."""
    attempts: int
    episodes: int
    infrastructure_failures: int
    turns: float
    tokens: float
    """All tokens of an episode, each node once."""
    sampled_tokens: float
    summaries: float
    """Summaries per episode."""
    tokens_per_summary: float
    summary_tokens: float
    """Summary tokens per episode."""
    outcomes: dict[str, int]


async def run_suite(
    suite: Suite, policy: Policy, environment: Environment, on_done: Callable[[Episode], None] | None = None
) -> tuple[SuiteResult, list[Episode]]:
    rollout = await roll_out(suite.jobs(), policy, environment, on_done)
    return summarise(rollout.episodes, suite.attempts), rollout.episodes


def summarise(episodes: Sequence[Episode], attempts: int) -> SuiteResult:
    """The SuiteResult of episodes, which may belong to any number of tasks.

    Raises:
      ValueError: no episode was graded.
    """
    graded = [e for e in episodes if e.reward is not None]
    if not graded:
        raise ValueError(f"none of {len(episodes)} episodes was graded: the sandboxes failed every time")
    by_task: dict[str, list[float]] = defaultdict(list)
    for episode in graded:
        by_task[episode.task_id].append(episode.reward)
    at_k = [pass_at_k(len(r), sum(x == 1 for x in r), min(attempts, len(r))) for r in by_task.values()]
    outcomes: dict[str, int] = defaultdict(int)
    for episode in episodes:
        outcomes[episode.outcome] += 1

    def mean(values) -> float:
        return float(np.mean([float(v) for v in values]))

    summaries, summary_tokens = mean(e.summaries for e in graded), mean(e.summary_tokens for e in graded)
    return SuiteResult(
        pass_at_1=mean(e.reward == 1 for e in graded),
        pass_at_k=float(np.mean(at_k)),
        attempts=attempts,
        episodes=len(graded),
        infrastructure_failures=len(episodes) - len(graded),
        turns=mean(e.turns for e in graded),
        tokens=mean(e.transcript.total_tokens for e in graded),
        sampled_tokens=mean(e.transcript.total_sampled for e in graded),
        summaries=summaries,
        tokens_per_summary=summary_tokens / summaries if summaries else 0.0,
        summary_tokens=summary_tokens,
        outcomes=dict(outcomes),
    )


def compaction_error(uncompacted: SuiteResult, compacted: SuiteResult) -> float:
    """Pass rate in an uncompacted long window minus pass rate with the trigger (our definition; Cursor gives none)."""
    return uncompacted.pass_at_1 - compacted.pass_at_1
