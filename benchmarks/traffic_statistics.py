"""False alarms, power and refusals of the tests that release weights, on simulated users and tasks.

    python -m benchmarks.traffic_statistics

Needs no network, no model and one core for less than a minute; every number has a fixed seed.
"""

import collections
import json
from collections.abc import Callable, Sequence

import numpy as np

from composer_jax.errors import UserError
from composer_jax.realtime.release.canary import ARM_SIZES_ALPHA
from composer_jax.realtime.release.gate import GateRules, gate
from composer_jax.realtime.release.statistics import (
    arm_sizes_half_width,
    confidence_sequence,
    effect_terms,
    required_tasks,
    running_moments,
    tightest_at,
)

RUNS, USERS = 2000, 2000
EFFECT = 0.1
"""In standard deviations of the users' means."""
SUITES, MARGIN = 3, 0.03
TASKS = [f"task{i}" for i in range(5000)]
"""Their names."""


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
    errors = np.sqrt(variances / np.arange(1, terms.shape[-1] + 1))
    return {
        "confidence_sequence": _share(np.abs(means) > half_widths),
        "fixed": _share((np.abs(means) > 1.96 * errors) & np.isfinite(half_widths)),
    }


def matched_rate(effect: float, *, runs: int = RUNS, users: int = USERS, seed: int = 0) -> float:
    """Returns how often the sequence says so of differences of matched users: mean `effect`, standard deviation 1."""
    values = np.random.default_rng(seed).standard_normal((runs, users)) + effect
    means, half_widths = confidence_sequence(values, tightest_at(users))
    return _share(np.abs(means) > half_widths)


def arm_size_alarms(
    fraction: float, *, assigned: float | None = None, runs: int = RUNS, users: int = 20_000, seed: int = 1
) -> float:
    """Returns how often a canary is held for the sizes of its arms, at any look after every user.

    assigned: the share of users that has the candidate; None is `fraction`, and nothing is wrong.
    """
    rng, count = np.random.default_rng(seed), np.arange(1, users + 1)
    half_widths = arm_sizes_half_width(count, fraction, tightest_at(USERS, ARM_SIZES_ALPHA), ARM_SIZES_ALPHA)
    share = fraction if assigned is None else assigned
    runs_of_shares = (np.cumsum(rng.random(users) < share) / count for _ in range(runs))
    return float(np.mean([(np.abs(shares - fraction) > half_widths).any() for shares in runs_of_shares]))


def gate_rates(
    worse: tuple[float, ...], *, runs: int = RUNS, tasks: int | None = None, seed: int = 2
) -> dict[str, float]:
    """Returns how often the gate passes a candidate and how often it asks for more tasks, and what that took.

    worse: per suite, by how much the candidate's chance to solve a task is below the anchor's. Tasks are solved in the
      mean over four attempts, with chances that differ by task.
    tasks: per suite; None is what `required_tasks` says for the standard deviation of the differences.
    """
    sd = float(np.std(_differences(np.random.default_rng(99), 0.0, 100_000)))
    tasks = required_tasks(sd, MARGIN, suites=len(worse)) if tasks is None else tasks
    rng, verdicts = np.random.default_rng(seed), collections.Counter()
    for _ in range(runs):
        verdicts[gate_verdict([_differences(rng, fall, tasks) for fall in worse])] += 1
    return {
        "tasks_per_suite": tasks,
        "sd": sd,
        "passed": verdicts["pass"] / runs,
        "refused": verdicts["refused"] / runs,
    }


def gate_verdict(suites: Sequence[np.ndarray]) -> str:
    """Returns what the gate says of differences by task, or "refused" if it asks for more tasks."""
    anchor, candidate = {}, {}
    for i, differences in enumerate(suites):
        names = TASKS[: len(differences)]
        solved = np.maximum(0, -differences)
        anchor[str(i)] = {"solved": dict(zip(names, solved.tolist(), strict=True))}
        candidate[str(i)] = {"solved": dict(zip(names, (solved + differences).tolist(), strict=True))}
    try:
        return gate(anchor, candidate, GateRules(MARGIN, monitors=()))["verdict"]
    except UserError:
        return "refused"


def broken_tasks_rate(tasks: int, *, runs: int = 20_000, seed: int = 6) -> float:
    """Returns how often the gate passes a candidate that mends no task and breaks each with the margin's chance."""
    counts, times = np.unique(np.random.default_rng(seed).binomial(tasks, MARGIN, runs), return_counts=True)
    passes = [gate_verdict([np.where(np.arange(tasks) < count, -1.0, 0.0)]) == "pass" for count in counts]
    return float(times[passes].sum() / runs)


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
        "false_alarms_matched": matched_rate(0.0),
        "found_matched_2000": matched_rate(EFFECT),
        "found_two_arms_2000": rejection_rates(EFFECT, 0.5, seed=4),
        "found_two_arms_2000_at_0.25": rejection_rates(EFFECT, 0.25, seed=4),
        "found_two_arms_8000": rejection_rates(EFFECT, 0.5, runs=500, users=4 * USERS, seed=4),
        "arm_sizes_held": {f"{p:.2f}": arm_size_alarms(p) for p in (0.5, 0.25, 0.05, 0.01)},
        "arm_sizes_held_at_0.30_for_0.25": arm_size_alarms(0.25, assigned=0.3, runs=300),
        "gate_one_suite_worse_by_margin": gate_rates((MARGIN, *equal[1:])),
        "gate_single_suite_worse_by_margin": gate_rates((MARGIN,)),
        "gate_equal": gate_rates(equal),
        "gate_only_breaks_tasks": {n: broken_tasks_rate(n) for n in (100, 150, 300, 620, 1000)},
    }


def main(report: Callable[[str], None] = print) -> None:
    """Prints the table, one line per row, as JSON."""
    for name, row in table().items():
        report(f"{name}: {json.dumps(row)}")


if __name__ == "__main__":
    main()
