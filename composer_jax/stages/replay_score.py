"""Scores the recorded groups of an RL run: log-probabilities under any weights, and rewards under any prices."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from composer_jax.checkpoint.base_model import check_base_model, load_base_weights
from composer_jax.errors import UserError
from composer_jax.models.flops import row_flops
from composer_jax.models.model_def import Params
from composer_jax.observe.progress import Progress
from composer_jax.parallel.mesh import batch_shards
from composer_jax.rl.batch import WeightedRow, pack_rows
from composer_jax.rl.played_group import PlayedGroup
from composer_jax.rl.records import RolloutRecords
from composer_jax.rl.rewards import reward_parts
from composer_jax.stages.run import Run
from composer_jax.train.scoring import TokenScorer

GROUPS_PER_CALL = 16
"""Groups whose rows are packed together."""


def score_records(run: Run, records: RolloutRecords, policy: str) -> dict[str, Any]:
    """Returns what the stored groups are under other weights and another reward.

    Raises UserError if no group is stored, or for weights of another network.

    Args:
      policy: address of weights for the run's network (checkpoint/address.py).

    Returns:
      groups, episodes: how many are stored; graded: episodes with a grade. grade, reward: means over those, the reward
      by rl.reward of this run. gaps: of log p - log p_sampler of all sampled tokens (gap_figures), with the
      experts of the sampler where rl.router_replay says so. by_version: version of the sampler's weights -> its gaps.
    """
    if not records.numbers:
        raise UserError(
            f"{records.folder} has deleted its groups; only a run with --config.rl.keep_groups=True keeps all."
        )
    check_base_model(policy, run.config.model)
    weights = load_base_weights(policy, run.model.definition, run.mesh, run.config.seed)
    scorer = TokenScorer(run.model.definition, run.mesh, plausibility=run.config.rl.loss.replay_plausibility)
    gaps, versions, grades, rewards, episodes = [], [], [], [], 0
    with Progress(len(records.numbers), "group", "score") as progress:
        for i in range(0, len(records.numbers), GROUPS_PER_CALL):
            groups = [records.load(number) for number in records.numbers[i : i + GROUPS_PER_CALL]]
            for row_gaps, row_versions in _score(run, scorer, weights, groups):
                gaps.append(row_gaps)
                versions.append(row_versions)
            for group in groups:
                graded = [episode for episode in group.episodes if episode.reward is not None]
                episodes += len(group.episodes)
                grades += [episode.reward for episode in graded]
                rewards += [parts.reward for parts in reward_parts(graded, run.config.rl.reward)]
            progress.update(len(groups))
    gap, version = np.concatenate(gaps), np.concatenate(versions)
    return {
        "groups": len(records.numbers),
        "episodes": episodes,
        "graded": len(grades),
        "grade": float(np.mean(grades)) if grades else None,
        "reward": float(np.mean(rewards)) if rewards else None,
        "gaps": gap_figures(gap) if gap.size else None,
        "by_version": {str(v): gap_figures(gap[version == v]) for v in np.unique(version)},
    }


def _score(
    run: Run, scorer: TokenScorer, weights: tuple[Params, Params], groups: Sequence[PlayedGroup]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns (log p - log p_sampler, version) of the sampled tokens of each row of the groups."""
    rows = [row for group in groups for episode in group.episodes for row in episode.transcript.rows()]
    packed = pack_rows(
        [WeightedRow.of(row, 0.0) for row in rows],
        run.config.rl.batches,
        shards=batch_shards(run.mesh),
        cost=functools.partial(row_flops, run.config.model),
        route_shape=run.config.rl.route_shape(run.config.model),
        n_experts=run.config.model.n_experts,
    )
    logprobs = packed.read([scorer(*weights, batch) for batch in packed.batches])
    return [
        ((own - row.logprobs)[row.trained], row.versions[row.trained]) for own, row in zip(logprobs, rows, strict=True)
    ]


def gap_figures(gaps: np.ndarray) -> dict[str, float]:
    """Returns the figures of log p - log p_sampler of sampled tokens, in nats, with four significant digits.

    p50, p99, max: of the absolute gap. beyond_2: fraction of the tokens whose ratio of probabilities is beyond 2 or 1/2
    (F(2) of arXiv 2510.11370). k1, k3: estimates of KL(sampler || p), the means of -log r and of r - 1 - log r with
    r = p / p_sampler.

    Raises ValueError if there are no tokens.
    """
    if not gaps.size:
        raise ValueError("gaps of no tokens have no figures")
    gaps = gaps.astype(np.float64)
    size = np.abs(gaps)
    figures = {
        "tokens": gaps.size,
        "p50": np.median(size),
        "p99": np.quantile(size, 0.99),
        "max": size.max(),
        "beyond_2": (size > np.log(2)).mean(),
        "k1": -gaps.mean(),
        "k3": (np.expm1(gaps) - gaps).mean(),
    }
    return {name: float(f"{value:.4g}") if name != "tokens" else int(value) for name, value in figures.items()}
