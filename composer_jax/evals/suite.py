"""A suite of attempts at tasks, and the measures of running it."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from composer_jax.agent.episode import Episode
from composer_jax.agent.episode_context import EpisodeContext
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import Compaction
from composer_jax.evals.interval import interval
from composer_jax.rl.rollout import PlayEpisode, require_graded, roll_out
from composer_jax.sampler.policy import ServingPolicy
from composer_jax.seeds import hash_seed
from composer_jax.tasks.task import Task


@dataclasses.dataclass(frozen=True)
class Suite:
    """Tasks, attempts at each, and one compaction."""

    name: str
    tasks: Sequence[Task]
    attempts: int
    compaction: Compaction
    seed: int = 0
    effort: str = ""
    """Level of effort of all episodes (EpisodeSettings.effort); "" for none."""

    def specs(self) -> list[EpisodeSpec]:
        """Returns the episodes; attempt i at a task has the same seed in every suite and for every policy."""
        return [
            EpisodeSpec(task, hash_seed("evaluation", self.seed, task.id, attempt), self.compaction, group, self.effort)
            for group, task in enumerate(self.tasks)
            for attempt in range(self.attempts)
        ]


@dataclasses.dataclass(frozen=True)
class SuiteResult:
    """Means over graded episodes; infrastructure failures are counted separately and never score."""

    pass_at_1: float
    low: float
    """Lower end of the 95 % interval of pass@1 (evals/interval.py)."""
    high: float
    """Upper end of that interval."""
    pass_at_k: float
    """Probability that at least one of `attempts` attempts solves a task; a task with fewer graded attempts counts with
    those."""
    tasks: int
    """Tasks with a graded attempt."""
    attempts: int
    episodes: int
    infrastructure_failures: int
    attempted: float
    """Fraction of the episodes that changed a file."""
    pass_given_attempt: float | None
    """Pass rate of those; None if there are none."""
    turns: float
    calls_per_turn: float
    """Tool calls per message of the model; above 1 where messages have several."""
    tokens: float
    """Tokens per episode, each node counted once."""
    sampled_tokens: float
    summaries: float
    """Summaries per episode."""
    tokens_per_summary: float
    summary_tokens: float
    """Summary tokens per episode."""
    facts_kept: float | None
    """Fraction of the needed facts that the first summary has, over the episodes with a summary whose task names the
    facts (agent/summary.py); None without any."""
    facts_kept_last: float | None
    """The same for the last summary."""
    outcomes: dict[str, int]
    solved: dict[str, float]
    """Task id -> fraction of its graded attempts that solved it, to compare policies task by task."""
    failed_tokens: dict[str, float]
    """Task id -> sampled tokens of its attempts that did not solve it, in the mean; without tasks that have none."""


async def run_suite(
    suite: Suite,
    policy: ServingPolicy,
    context: EpisodeContext,
    on_done: Callable[[Episode], None] | None,
    play_one: PlayEpisode | None,
) -> tuple[SuiteResult, list[Episode]]:
    """Plays the suite's episodes; returns their measures and the episodes, in the order of `suite.specs()`.

    Arguments after the suite are those of `roll_out`. Raises UserError if the infrastructure lost all episodes.
    """
    episodes = await roll_out(suite.specs(), policy, context, on_done, play_one)
    require_graded(episodes)
    return summarise(episodes, suite.attempts), episodes


def summarise(episodes: Sequence[Episode], attempts: int) -> SuiteResult:
    """Returns the SuiteResult of episodes, which may belong to any number of tasks.

    Raises ValueError if no episode was graded.
    """
    graded = [e for e in episodes if e.reward is not None]
    if not graded:
        raise ValueError(f"none of {len(episodes)} episodes was graded: the sandboxes failed every time")
    solved_by_task: dict[str, list[bool]] = defaultdict(list)
    failures_by_task: dict[str, list[int]] = defaultdict(list)
    for episode in graded:
        solved_by_task[episode.task_id].append(episode.reward == 1)
        if episode.reward != 1:
            failures_by_task[episode.task_id].append(episode.transcript.total_sampled)
    at_k = [pass_at_k(len(solved), sum(solved), min(attempts, len(solved))) for solved in solved_by_task.values()]
    outcomes: dict[str, int] = defaultdict(int)
    for episode in episodes:
        outcomes[episode.outcome] += 1

    def mean(values) -> float:
        return float(np.mean([float(v) for v in values]))

    def mean_known(values) -> float | None:
        known = [value for value in values if value is not None]
        return mean(known) if known else None

    solved = {task: mean(attempts_at) for task, attempts_at in solved_by_task.items()}
    low, high = interval(list(solved.values()))
    attempted = [e for e in graded if e.usage.changed_files]
    summaries, summary_tokens = mean(e.summaries for e in graded), mean(e.summary_tokens for e in graded)
    return SuiteResult(
        pass_at_1=mean(e.reward == 1 for e in graded),
        low=low,
        high=high,
        pass_at_k=float(np.mean(at_k)),
        tasks=len(solved),
        attempts=attempts,
        episodes=len(graded),
        infrastructure_failures=len(episodes) - len(graded),
        attempted=len(attempted) / len(graded),
        pass_given_attempt=mean(e.reward == 1 for e in attempted) if attempted else None,
        turns=mean(e.turns for e in graded),
        calls_per_turn=sum(e.usage.total_calls for e in graded) / max(1, sum(e.turns for e in graded)),
        tokens=mean(e.transcript.total_tokens for e in graded),
        sampled_tokens=mean(e.transcript.total_sampled for e in graded),
        summaries=summaries,
        tokens_per_summary=summary_tokens / summaries if summaries else 0.0,
        summary_tokens=summary_tokens,
        facts_kept=mean_known(e.facts_kept for e in graded),
        facts_kept_last=mean_known(e.facts_kept_last for e in graded),
        outcomes=dict(outcomes),
        solved=solved,
        failed_tokens={task: mean(tokens) for task, tokens in failures_by_task.items()},
    )


def compaction_error(uncompacted: SuiteResult, compacted: SuiteResult) -> float:
    """Returns pass@1 without compaction minus pass@1 with it (our definition; Cursor publishes none)."""
    return uncompacted.pass_at_1 - compacted.pass_at_1


def pass_at_k(n: int, solved: int, k: int) -> float:
    """Returns the unbiased estimate of the chance that one of k attempts solves a task, from `solved` of n attempts.

    1 - C(n - solved, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, equation 1). Raises ValueError if k > n, which
    cannot be estimated.
    """
    if not 0 < k <= n or not 0 <= solved <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {solved} of {n} attempts")
    return 1 - math.comb(n - solved, k) / math.comb(n, k)
