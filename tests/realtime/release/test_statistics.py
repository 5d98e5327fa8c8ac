"""Tests of a release: what they promise holds in simulations with a fixed seed."""

import numpy as np
import pytest

from benchmarks.traffic_statistics import arm_size_alarms, broken_tasks_rate, gate_rates, matched_rate, rejection_rates
from composer_jax.realtime.release.statistics import (
    FIRST_LOOK,
    confidence_sequence,
    confidence_sequence_half_width,
    effect_terms,
    noninferiority,
    promised_margin,
    required_tasks,
    running_moments,
    tightest_at,
)


@pytest.mark.parametrize("fraction", [0.5, 0.1])
def test_equal_arms_stay_silent_at_all_looks_together_where_a_fixed_test_does_not(fraction):
    rates = rejection_rates(0.0, fraction, runs=300, users=1200)
    assert rates["confidence_sequence"] <= 0.05
    assert rates["fixed"] > 0.1


def test_an_effect_is_found_by_the_planned_number_of_users():
    assert matched_rate(0.1, runs=400) >= 0.9


def test_a_sequence_is_tightest_at_about_the_planned_number():
    users, at = 2000, np.arange(100, 6000)
    relative = confidence_sequence_half_width(at, 1.0, tightest_at(users)) / np.sqrt(1 / at)
    assert abs(at[relative.argmin()] - users) < 0.3 * users


def test_terms_of_two_arms_estimate_the_effect_while_the_fraction_rises():
    rng, users = np.random.default_rng(0), 200_000
    fraction = np.repeat([0.01, 0.05, 0.25, 0.5], users // 4)
    is_candidate = rng.random(users) < fraction
    values = rng.normal(3, 1, users) + 0.2 * is_candidate
    terms = effect_terms(values, is_candidate, fraction)
    assert terms.mean() == pytest.approx(0.2, abs=4 * terms.std() / np.sqrt(users))


def test_no_look_before_both_arms_have_users():
    values, is_candidate = np.arange(400.0), np.arange(400) % 4 == 0
    _, widths = confidence_sequence(values, 0.05, is_candidate=is_candidate)
    assert np.isinf(widths[: 4 * FIRST_LOOK - 4]).all() and np.isfinite(widths[4 * FIRST_LOOK - 3 :]).all()


def test_running_moments_are_those_of_numpy_far_from_zero():
    values = np.random.default_rng(1).standard_normal((3, 50)) + 1e6
    means, variances = running_moments(values)
    np.testing.assert_allclose(means[:, 20], values[:, :21].mean(1))
    np.testing.assert_allclose(variances[:, 20], values[:, :21].var(1, ddof=1), rtol=1e-6)


def test_a_margin_that_few_tasks_can_promise():
    assert promised_margin(150, 0.3, power=0.8) == pytest.approx(0.07, abs=0.002)
    tasks = required_tasks(0.3, 0.03)
    assert promised_margin(tasks, 0.3) <= 0.03 < promised_margin(tasks - 1, 0.3)
    assert 619 < required_tasks(0.3, 0.03, power=0.8) < 719
    assert required_tasks(0.3, 0.03, suites=3) > required_tasks(0.3, 0.03) > 719
    assert promised_margin(20, 0.0) >= 3 / 20, "no difference among few tasks promises little"
    assert promised_margin(20, 0.0, level=0.4, power=0.5) == 3 / 20


def test_the_gate_refuses_a_candidate_that_is_worse_by_the_margin_and_passes_an_equal_one():
    assert gate_rates((0.03, 0.0), runs=300)["passed"] <= 0.07
    equal = gate_rates((0.0, 0.0), runs=300)
    assert equal["passed"] >= 0.87 and equal["refused"] <= 0.1


@pytest.mark.parametrize("tasks", [100, 300])
def test_the_gate_refuses_a_candidate_that_only_breaks_tasks(tasks):
    assert broken_tasks_rate(tasks) <= 0.06


def test_a_shift_of_every_difference_moves_the_lower_end():
    differences = np.random.default_rng(0).normal(0, 0.3, 700)
    result = noninferiority(differences - differences.mean(), 0.03)
    assert result.passed and result.lower < 0
    assert not noninferiority(differences - differences.mean() - 0.03, 0.03).passed


@pytest.mark.parametrize("fraction", [0.5, 0.05, 0.01])
def test_arms_that_are_assigned_rightly_are_held_at_no_look(fraction):
    assert arm_size_alarms(fraction, runs=300, users=8000) <= 0.005


def test_arms_of_wrong_sizes_are_held():
    assert arm_size_alarms(0.25, assigned=0.3, runs=100, users=8000) > 0.95


def test_terms_do_not_depend_on_where_values_lie():
    values, is_candidate = np.random.default_rng(0).normal(0, 1, 300), np.arange(300) % 3 == 0
    fraction = np.asarray(0.05)
    shifted = effect_terms(values + 1000, is_candidate, fraction)
    np.testing.assert_allclose(shifted, effect_terms(values, is_candidate, fraction), atol=1e-6)
