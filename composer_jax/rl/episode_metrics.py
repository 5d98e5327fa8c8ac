"""Metrics of the episodes of one RL step: columns of metrics/rl.jsonl."""

from collections.abc import Iterable, Sequence

import numpy as np

from composer_jax.agent.episode import Episode
from composer_jax.agent.usage import SHELL
from composer_jax.rl.penalties import BEHAVIORS, behaviors
from composer_jax.rl.rewards import RewardConfig, RewardParts, reward_parts
from composer_jax.tasks.grading.hack_monitor import FLAG_NAMES

TOKENS = ("thinking_tokens", "call_tokens", "output_tokens", "final_tokens")
"""Counts of EpisodeUsage whose means are metrics."""

Graded = Sequence[tuple[Episode, RewardParts]]
Row = dict[str, float | None]


def episode_metrics(groups: Sequence[Sequence[Episode]], config: RewardConfig) -> Row:
    """Returns means over the graded episodes of one step, None without any.

    reward, grade                       what is optimised, and what grading gave; also by family (reward_FAMILY)
    length_cost, penalty                the costs before they are bounded
    costs_bounded                       fraction of the episodes that did not pay all of their costs
    behavior_NAME, penalty_NAME         a behaviour from 0 to 1 whatever it costs; its price, if it has one
    flagged, flag_NAME                  number of episodes that the hack monitor flagged, also by flag
    turns, tokens, calls, ..._tokens    lengths (EpisodeUsage); tokens are those of all nodes
    out_of_time, killed_sandbox         number of episodes that the policy broke (docs/rewards.md)
    grade_effort_LEVEL, tokens_effort_LEVEL     by level of effort: grade and sampled tokens
    pass_compacted, summaries, failed_summaries, summary_tokens     over the episodes with a summary
    facts_kept, facts_kept_last         of the first and the last summary, over those whose task names the facts

    Episodes with given advantages, such as users' sessions, are in no column but these, which are there with some:

    sessions, session_reward            how many, and their mean reward
    """
    given = [e for group in groups for e in group if e.advantages is not None]
    groups = [[e for e in group if e.advantages is None] for group in groups]
    episodes = [e for group in groups for e in group]
    graded: list[tuple[Episode, RewardParts]] = []
    for group in groups:
        graded_episodes = [e for e in group if e.reward is not None]
        graded += zip(graded_episodes, reward_parts(graded_episodes, config), strict=True)
    return {
        "reward": _mean(parts.reward for _, parts in graded),
        "grade": _mean(parts.grade for _, parts in graded),
        "length_cost": _mean(parts.length_cost for _, parts in graded),
        "penalty": _mean(parts.penalty for _, parts in graded),
        "costs_bounded": _mean(parts.is_bounded for _, parts in graded),
        "turns": _mean(e.turns for e, _ in graded),
        "tokens": _mean(e.transcript.total_tokens for e, _ in graded),
        **{name: _mean(getattr(e.usage, name) for e, _ in graded) for name in TOKENS},
        "calls": _mean(e.usage.total_calls for e, _ in graded),
        "shell_calls": _mean(e.usage.calls.get(SHELL, 0) for e, _ in graded),
        "infrastructure_failures": len(episodes) - len(graded),
        "out_of_time": sum(e.outcome == "out_of_time" for e, _ in graded),
        "killed_sandbox": sum(e.outcome == "killed_sandbox" for e, _ in graded),
        "finished": _mean(e.outcome == "finished" for e, _ in graded),
        **_by_family(episodes, graded),
        **_by_effort(graded),
        **_of_behavior(graded, config),
        **_of_flags(graded),
        **_of_summaries(graded),
        **({"sessions": len(given), "session_reward": _mean(e.reward or 0.0 for e in given)} if given else {}),
    }


def _by_family(episodes: Sequence[Episode], graded: Graded) -> Row:
    row: Row = {}
    for family in sorted({e.family for e in episodes}):
        row[f"reward_{family}"] = _mean(parts.reward for e, parts in graded if e.family == family)
        row[f"grade_{family}"] = _mean(parts.grade for e, parts in graded if e.family == family)
    return row


def _by_effort(graded: Graded) -> Row:
    row: Row = {}
    for level in sorted({e.effort for e, _ in graded if e.effort}):
        row[f"grade_effort_{level}"] = _mean(parts.grade for e, parts in graded if e.effort == level)
        row[f"tokens_effort_{level}"] = _mean(e.transcript.total_sampled for e, _ in graded if e.effort == level)
    return row


def _of_behavior(graded: Graded, config: RewardConfig) -> Row:
    measured = [behaviors(e, config.behaviors) for e, _ in graded]
    priced = [name for name, price in config.penalties.items() if price]
    return {
        **{f"behavior_{name}": _mean(v[name] for v in measured) for name in (*BEHAVIORS, *config.behaviors)},
        **{f"penalty_{name}": _mean(parts.penalties[name] for _, parts in graded) for name in priced},
    }


def _of_flags(graded: Graded) -> Row:
    flagged = [{flag.partition(":")[0] for flag in e.flags} for e, _ in graded]
    by_name = {f"flag_{name}": sum(name in names for names in flagged) for name in FLAG_NAMES}
    return {"flagged": sum(bool(names) for names in flagged), **by_name}


def _of_summaries(graded: Graded) -> Row:
    compacted = [(e, parts) for e, parts in graded if e.summaries]
    return {
        "pass_compacted": _mean(parts.grade for _, parts in compacted),
        "summaries": _mean(e.summaries for e, _ in compacted),
        "failed_summaries": _mean(e.failed_summaries for e, _ in compacted),
        "facts_kept": _mean(e.facts_kept for e, _ in compacted if e.facts_kept is not None),
        "facts_kept_last": _mean(e.facts_kept_last for e, _ in compacted if e.facts_kept_last is not None),
        "summary_tokens": _mean(e.summary_tokens for e, _ in compacted),
    }


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return float(np.mean(values)) if values else None
