"""Quantiles of the normal distribution and of Student's, for intervals and tests."""

from statistics import NormalDist


def z_quantile(probability: float) -> float:
    """Returns the quantile of the standard normal distribution."""
    return NormalDist().inv_cdf(probability)


def t_quantile(probability: float, freedom: int) -> float:
    """Returns Student's quantile by its expansion in 1/freedom (Abramowitz and Stegun, 26.7.5, four terms).

    For probabilities up to 0.975 within 0.001 of the exact one from 4 degrees of freedom on.
    """
    z = z_quantile(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))
