"""Quantiles of Student's t are those of tables."""

import pytest

from composer_jax.realtime.quantiles import t_quantile


@pytest.mark.parametrize(
    ("probability", "freedom", "exact"),
    [
        (0.975, 4, 2.7764),
        (0.975, 9, 2.2622),
        (0.975, 30, 2.0423),
        (0.975, 10**6, 1.96),
        (0.95, 5, 2.0150),
        (0.95, 20, 1.7247),
    ],
)
def test_students_quantile(probability, freedom, exact):
    assert t_quantile(probability, freedom) == pytest.approx(exact, abs=1e-3)
