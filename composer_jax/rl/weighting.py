"""Groups -> the rows to train: the algorithm, and the rules that hold for every algorithm."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from composer_jax.agent.episode import Episode
from composer_jax.rl.algorithm import Algorithm
from composer_jax.rl.batch import Group, HintedSpan, WeightedRow
from composer_jax.rl.config import AlgorithmConfig
from composer_jax.rl.toggle import toggle_rewards

FindHints = Callable[[Episode], Mapping[int, tuple[HintedSpan, ...]]]
"""Returns the hints of an episode by the number of the row in Transcript.rows()."""

OVERLONG = ("out_of_turns", "out_of_context", "out_of_segments")
"""Outcomes of episodes that a limit ended."""


def weighted_rows(
    groups: Sequence[Group],
    algorithm: Algorithm,
    step: int = 0,
    config: AlgorithmConfig | None = None,
    find_hints: FindHints | None = None,
) -> list[list[WeightedRow]]:
    """Returns, for each group, the rows that have something to train; none for a group without a signal.

    A row with hints and without a signal of its rewards is trained towards its teacher only.

    Args:
      step: RL steps before this one.
      config: rules for rewards before the algorithm, and for rows after it; None: the defaults, which change nothing.
      find_hints: finds the hints of an episode that the rules leave in the loss (rl/feedback.py); None: no hints.
    """
    config, numbers, by_group = config or AlgorithmConfig(), itertools.count(), []
    for group in groups:
        chosen = []
        for episode, rows in zip(group.episodes, weigh_episodes(group, algorithm, step, config), strict=True):
            number = next(numbers)
            hints = find_hints(episode) if find_hints and rows else {}
            hinted = (dataclasses.replace(row, episode=number, hints=hints.get(i, ())) for i, row in enumerate(rows))
            chosen += [row if row.has_signal else row.without_signal() for row in hinted if row.has_signal or row.hints]
        by_group.append(chosen)
    return by_group


def weigh_episodes(group: Group, algorithm: Algorithm, step: int, config: AlgorithmConfig) -> list[list[WeightedRow]]:
    """Returns all rows of each episode of a group, with a signal or without; none of an episode that a rule leaves out.

    Arguments are those of `weighted_rows`.
    """
    by_episode = algorithm.weigh(toggle_rewards(group, config.toggle, step), step)
    return [_apply_rules(rows, episode, config) for episode, rows in zip(group.episodes, by_episode, strict=True)]


def _apply_rules(rows: Sequence[WeightedRow], episode: Episode, config: AlgorithmConfig) -> list[WeightedRow]:
    if config.mask_overlong and episode.outcome in OVERLONG:
        return []
    return list(rows)
