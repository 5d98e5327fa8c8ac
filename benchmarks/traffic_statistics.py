"""False alarms, power and refusals of the tests that release weights, on simulated users and tasks.

    python -m benchmarks.traffic_statistics

Needs no network, no model and one core for less than a minute; every number has a fixed seed.
"""

import json
from collections.abc import Callable

import numpy as np

from composer_jax.realtime.release.statistics import (
    arm_sizes_p_value,
    confidence_sequence,
    effect_terms,
    mixture_sprt_p_values,
    noninferiority,
    required_tasks,
    running_moments,
    tightest_at,
)

RUNS, USERS = 2000, 2000
EFFECT = 0.1
"""In standard deviations of the users' means."""
SUITES, MARGIN = 3, 0.03
PLANNED_POWER = 0.92
"""Of an equal candidate to pass all suites, for which the tasks are counted."""
TAU = 0.05


def two_arms(
    effect: float, fraction: float, *, runs: int = RUNS, users: int = USERS, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (values, is_candidate), each [runs, users]: kept shares of users, most of them near 0 or 1.

    effect: of the candidate, in standard deviations.
    """
    rng = np.random.default_rng(seed)
    values = rng.beta(0.6, 0.4, (runs, users))
    is_candidate = rng.random((runs, users)) < fraction
    return values + effect * values.std() * is_candidate, is_candidate


def rejection_rates(effect: float, fraction: float, **size: int) -> dict[str, float]:
    """Returns how often each test says, at any look after every user, that two arms differ.

    "fixed" is the test of 1.96 standard errors, repeated.
    """
    values, is_candidate = two_arms(effect, fraction, **size)
    terms = effect_terms(values, is_candidate, np.asarray(fraction))
    means, half_widths = confidence_sequence(terms, tightest_at(terms.shape[-1]), is_candidate=is_candidate)
    _, variances = running_moments(terms)
    p = mixture_sprt_p_values(means, variances, TAU * values.std() / np.sqrt(fraction * (1 - fraction)), is_candidate)
    errors = np.sqrt(variances / np.arange(1, terms.shape[-1] + 1))
    return {
        "confidence_sequence": _share(np.abs(means) > half_widths),
        "mixture_sprt": _share(p < 0.05),
        "fixed": _share((np.abs(means) > 1.96 * errors) & np.isfinite(half_widths)),
    }


def one_sample_rates(effect: float, *, runs: int = RUNS, users: int = USERS, seed: int = 0) -> dict[str, float]:
    """As `rejection_rates`, for one value per user with mean `effect` and standard deviation 1 (matched users)."""
    values = np.random.default_rng(seed).standard_normal((runs, users)) + effect
    means, half_widths = confidence_sequence(values, tightest_at(users))
    p = mixture_sprt_p_values(means, running_moments(values)[1], TAU)
    return {"confidence_sequence": _share(np.abs(means) > half_widths), "mixture_sprt": _share(p < 0.05)}


def arm_size_alarms(fraction: float = 0.5, runs: int = RUNS, users: int = USERS, seed: int = 1) -> float:
    """Returns how often arms that are assigned rightly fail the test of their sizes (p < 0.001)."""
    counts = np.random.default_rng(seed).binomial(users, fraction, runs)
    return float(np.mean([arm_sizes_p_value(int(count), users, fraction * users) < 0.001 for count in counts]))


def gate_rates(
    worse: tuple[float, ...], *, runs: int = RUNS, tasks: int | None = None, seed: int = 2
) -> dict[str, float]:
    """Returns how often the gate passes a candidate, and what that took.

    worse: per suite, by how much the candidate's chance to solve a task is below the anchor's. Tasks are solved in the
      mean over four attempts, with chances that differ by task.
    tasks: per suite; None is what `required_tasks` says for the standard deviation of the differences.
    """
    sd = float(np.std(_differences(np.random.default_rng(99), 0.0, 100_000)))
    tasks = required_tasks(sd, MARGIN, suites=len(worse), power=PLANNED_POWER) if tasks is None else tasks
    rng, passes = np.random.default_rng(seed), 0
    for _ in range(runs):
        differences = [_differences(rng, fall, tasks) for fall in worse]
        passes += all(noninferiority(one, MARGIN).passed for one in differences)
    return {"tasks_per_suite": tasks, "sd": sd, "passed": passes / runs}


def _differences(rng: np.random.Generator, worse: float, tasks: int) -> np.ndarray:
    """Returns [tasks] solved by the candidate minus solved by the anchor, in the mean over four attempts at each."""
    chance = rng.uniform(0.15, 0.85, tasks)
    return (rng.binomial(4, chance - worse) - rng.binomial(4, chance)) / 4


def _share(alarms: np.ndarray) -> float:
    return float(alarms.any(axis=-1).mean())


def table() -> dict[str, object]:
    """Returns every number of this page."""
    equal = (0.0,) * SUITES
    return {
        "false_alarms": {f"{p:.2f}": rejection_rates(0.0, p, seed=3) for p in (0.5, 0.25, 0.05)},
        "false_alarms_0.01_of_20000": rejection_rates(0.0, 0.01, runs=300, users=20_000, seed=3),
        "false_alarms_matched": one_sample_rates(0.0),
        "found_matched": one_sample_rates(EFFECT),
        "found_two_arms_2000": rejection_rates(EFFECT, 0.5, seed=4),
        "found_two_arms_8000": rejection_rates(EFFECT, 0.5, runs=500, users=4 * USERS, seed=4),
        "arm_size_alarms": arm_size_alarms(),
        "gate_one_suite_worse_by_margin": gate_rates((MARGIN, *equal[1:])),
        "gate_all_suites_worse_by_margin": gate_rates((MARGIN,) * SUITES),
        "gate_single_suite_worse_by_margin": gate_rates((MARGIN,)),
        "gate_equal": gate_rates(equal),
    }


def main(report: Callable[[str], None] = print) -> None:
    """Prints the table, one line per row, as JSON."""
    for name, row in table().items():
        report(f"{name}: {json.dumps(row)}")


if __name__ == "__main__":
    main()
