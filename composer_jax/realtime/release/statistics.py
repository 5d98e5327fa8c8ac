"""Tests of a release: paired non-inferiority for the gate, always-valid sequences for the canary.

A canary is looked at whenever somebody likes. A test of fixed size, repeated at every look, finds a difference between
equal arms sooner or later; a confidence sequence holds at all looks together.
"""

import dataclasses
import math

import numpy as np

from composer_jax.realtime.quantiles import t_quantile, z_quantile

FIRST_LOOK = 50
"""Users before the first look, in each of two arms: the sequences are asymptotic, and the standard deviation of fewer
says little."""


# ---------------------------------------------------------------- the gate


@dataclasses.dataclass(frozen=True)
class NonInferiority:
    """A test of whether a candidate is worse than its anchor by less than a margin, paired by task."""

    tasks: int
    mean: float
    """Of the differences, candidate minus anchor."""
    sd: float
    lower: float
    """Lower end of the one-sided interval of the mean, one pseudo task included (see `noninferiority`)."""
    margin: float
    promised_margin: float
    """The smallest margin that an equal candidate meets with the power asked for (see `promised_margin`)."""
    passed: bool


def noninferiority(
    differences: np.ndarray, margin: float, *, level: float = 0.05, power: float = 0.9
) -> NonInferiority:
    """Returns the one-sided paired test of `mean difference > -margin`.

    It passes iff D - t sd / sqrt(n) >= -margin, t being Student's quantile of `level` (see `t_quantile`). A test that
    finds no significant difference shows no such thing: a suite of few tasks never finds one. D, sd and n include a
    pseudo task that only the candidate fails: where a candidate breaks few tasks and mends none, the sample has too
    small a standard deviation when it has too few broken tasks, and a t-test passes one such candidate in five.

    Args:
      differences: [N], one per task: solved by the candidate minus solved by the anchor, each the mean over attempts.
      power: with which `promised_margin` is computed.

    Raises ValueError for fewer than two tasks.
    """
    count = len(differences)
    if count < 2:
        raise ValueError(f"{count} tasks have no standard deviation; at least two are needed")
    mean, sd = float(np.mean(differences)), float(np.std(differences, ddof=1))
    with_pseudo = np.append(differences, -1.0)
    error = float(np.std(with_pseudo, ddof=1)) / math.sqrt(count + 1)
    lower = float(np.mean(with_pseudo)) - t_quantile(1 - level, count) * error
    promised = promised_margin(count, sd, level=level, power=power)
    return NonInferiority(count, mean, sd, lower, margin, promised, lower >= -margin)


def promised_margin(tasks: int, sd: float, *, level: float = 0.05, power: float = 0.9) -> float:
    """Returns the smallest margin that a candidate equal to its anchor meets with probability `power`.

    (t_{1-level} + z_power) sqrt((sd^2 + 1/n) / n) + 1/n, whose 1/n are the pseudo task, and at least 3/n: of n tasks
    without a difference, one in n/3 may still differ (the rule of three).
    """
    quantiles = t_quantile(1 - level, tasks) + z_quantile(power)
    return max(quantiles * math.sqrt((sd**2 + 1 / tasks) / tasks) + 1 / tasks, 3 / tasks)


def required_tasks(sd: float, margin: float, *, suites: int = 1, level: float = 0.05, power: float = 0.9) -> int:
    """Returns the tasks that each suite needs for an equal candidate to pass all suites with probability `power`.

    A candidate passes iff it passes every suite, so the level needs no correction (an intersection-union test: one
    suite in which it is worse by the margin refuses it with probability 1 - level). The power does: suites that are
    independent pass together with the product of their powers, so each needs power^(1/suites), and n is the smallest
    with promised_margin(n) <= margin: somewhat above ((z_{1-level} + z_{power^(1/suites)}) sd / margin)^2.
    """
    power = suite_power(power, suites)
    quantiles = z_quantile(1 - level) + z_quantile(power)
    tasks = max(2, math.ceil((quantiles * sd / margin) ** 2))
    while promised_margin(tasks, sd, level=level, power=power) > margin:
        tasks += 1
    return tasks


def suite_power(power: float, suites: int) -> float:
    """Returns the power that each of several independent suites needs, for `power` of all together."""
    return power ** (1 / suites)


# ---------------------------------------------------------------- the canary


def confidence_sequence_half_width(count, sd, rho: float, alpha: float = 0.05):
    """Returns the half-width of an interval that holds the mean at all counts together with probability 1 - alpha.

    sd sqrt(2 (n rho^2 + 1) / (n^2 rho^2) log(sqrt(n rho^2 + 1) / alpha)), asymptotic and two-sided (Waudby-Smith et
    al., "Time-uniform central limit theory and asymptotic confidence sequences", arXiv 2103.06476, theorem 2.2).

    Args:
      count: users n so far; a number or an array. sd: their standard deviation, of the same shape.
      rho: where the sequence is tightest (`tightest_at`).
    """
    spread = count * rho**2 + 1
    return sd * np.sqrt(2 * spread / (count**2 * rho**2) * np.log(np.sqrt(spread) / alpha))


def tightest_at(users: int, alpha: float = 0.05) -> float:
    """Returns the rho with which a confidence sequence is about tightest after `users` (section 2.4 of that paper)."""
    log = -2 * math.log(alpha)
    return math.sqrt((log + math.log(log) + 1) / users)


def running_moments(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (means, variances) of the first 1, 2, ... of the values along the last axis; the variance of one is 0."""
    count = np.arange(1, values.shape[-1] + 1)
    shift = values[..., :1]  # the variance is that of values around the first one, which loses fewer digits
    sums = np.cumsum(values - shift, axis=-1)
    squares = np.cumsum((values - shift) ** 2, axis=-1)
    variances = (squares - sums**2 / count) / np.maximum(count - 1, 1)
    return shift + sums / count, np.maximum(variances, 0.0)


def confidence_sequence(
    values: np.ndarray, rho: float, alpha: float = 0.05, is_candidate: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (means, half-widths) after each of the values along the last axis; infinite before FIRST_LOOK.

    is_candidate: bool[..., N] for the terms of two arms (`effect_terms`), each of which needs FIRST_LOOK users.
    """
    means, variances = running_moments(values)
    count = np.arange(1, values.shape[-1] + 1)
    half_widths = confidence_sequence_half_width(count, np.sqrt(variances), rho, alpha)
    return means, np.where(_may_look(values.shape, is_candidate), half_widths, np.inf)


def _may_look(shape: tuple[int, ...], is_candidate: np.ndarray | None) -> np.ndarray:
    """Returns bool[..., N]: whether there are FIRST_LOOK users, in each of two arms."""
    count = np.arange(1, shape[-1] + 1)
    if is_candidate is None:
        return np.broadcast_to(count >= FIRST_LOOK, shape)
    candidates = np.cumsum(is_candidate, axis=-1)
    return np.minimum(candidates, count - candidates) >= FIRST_LOOK


def effect_terms(values: np.ndarray, is_candidate: np.ndarray, fraction: np.ndarray) -> np.ndarray:
    """Returns one term per user, whose mean estimates the candidate's mean minus the anchor's.

    The augmented inverse-propensity term of a randomised experiment (arXiv 2103.06476, section 4): with running means
    m of the users before, m_c - m_a + [candidate] (y - m_c) / p - [anchor] (y - m_a) / (1 - p). Each has the effect as
    its expectation whatever p is. The first user's term is 0, because there is no mean before.

    Args:
      values: [..., N] a mean per user, in the order in which the users came.
      is_candidate: bool[..., N]. fraction: p in (0, 1) when the user came, [..., N] or broadcast to it.
    """
    before = [_mean_before(values, chosen) for chosen in (is_candidate, ~is_candidate)]
    terms = before[0] - before[1]
    terms += np.where(is_candidate, (values - before[0]) / fraction, 0.0)
    return terms - np.where(is_candidate, 0.0, (values - before[1]) / (1 - fraction))


def _mean_before(values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Returns the mean of the chosen values before each one, or else of all before; of the first value, itself."""
    sums, counts = np.cumsum(np.where(chosen, values, 0.0), axis=-1), np.cumsum(chosen, axis=-1)
    totals = np.cumsum(values, axis=-1) / np.arange(1, values.shape[-1] + 1)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), totals)
    return np.concatenate([values[..., :1], means[..., :-1]], axis=-1)


def arm_sizes_half_width(users, fraction: float, rho: float, alpha: float = 0.001):
    """Returns how far the candidate's share of users may be from `fraction`, at all counts together.

    A chi-square test at each look would find a wrong size sooner or later. Infinite before FIRST_LOOK users are due in
    each arm: of ten users at 1 %, one candidate says nothing.

    users: a number or an array of counts. rho: as of `confidence_sequence_half_width`.
    """
    half_width = confidence_sequence_half_width(users, math.sqrt(fraction * (1 - fraction)), rho, alpha)
    return np.where(users * min(fraction, 1 - fraction) >= FIRST_LOOK, half_width, np.inf)
