"""Groups -> the rows to train: those of the algorithm that have a signal, and those with hints."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from composer_jax.agent.episode import Episode
from composer_jax.rl.algorithm import Algorithm
from composer_jax.rl.batch import Group, HintedSpan, WeightedRow

FindHints = Callable[[Episode], Mapping[int, tuple[HintedSpan, ...]]]
"""Returns the hints of an episode by the number of the row in Transcript.rows()."""


def weighted_rows(
    groups: Sequence[Group],
    algorithm: Algorithm,
    step: int = 0,
    find_hints: FindHints | None = None,
) -> list[list[WeightedRow]]:
    """Returns, for each group, the rows that have something to train; none for a group without a signal.

    A row with hints and without a signal of its rewards is trained towards its teacher only.

    Args:
      step: RL steps before this one.
      find_hints: finds the hints of an episode (rl/feedback.py); None: no hints.
    """
    numbers, by_group = itertools.count(), []
    for group in groups:
        chosen = []
        for episode, rows in zip(group.episodes, algorithm.weigh(group, step), strict=True):
            number = next(numbers)
            hints = find_hints(episode) if find_hints else {}
            hinted = (dataclasses.replace(row, episode=number, hints=hints.get(i, ())) for i, row in enumerate(rows))
            chosen += [row if row.has_signal else row.without_signal() for row in hinted if row.has_signal or row.hints]
        by_group.append(chosen)
    return by_group
