"""Intervals over tasks, against the normal approximation and by coverage."""

import numpy as np
import pytest

from composer_jax.evals.interval import interval


def test_a_large_sample_has_the_interval_of_the_normal_approximation():
    values = np.random.default_rng(1).random(2000)
    low, high = interval(list(values))
    half = 1.96 * values.std() / np.sqrt(len(values))
    assert low == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.15 * half)


def test_intervals_cover_the_mean_nearly_as_often_as_they_say():
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(200):
        low, high = interval(list(rng.binomial(4, 0.3, 40) / 4))
        covered += low <= 0.3 <= high
    assert 0.88 <= covered / 200 <= 1.0


def test_equal_values_have_no_width_and_no_values_are_refused():
    assert interval([0.5] * 7) == (0.5, 0.5)
    with pytest.raises(ValueError):
        interval([])
