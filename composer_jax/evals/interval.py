"""Intervals of means over tasks, by resampling tasks: attempts at one task are not independent of each other."""

from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % bootstrap interval (low, high) of the mean of one value per task.

    The percentile bootstrap (Efron and Tibshirani 1993, chapter 13) with a fixed seed. To compare two policies on the
    same tasks, give the differences task by task. Raises ValueError without values.

    values: one number per task, such as the fraction of its attempts that solved it.
    """
    if not len(values):
        raise ValueError("an interval needs at least one value")
    array = np.asarray(values, np.float64)
    draws = np.random.default_rng(0).integers(len(array), size=(RESAMPLES, len(array)))
    low, high = np.quantile(array[draws].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)
