"""Baselines against slow references, their mean, and the variance that they take away."""

import math
import statistics

import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.realtime.batches import baselines
from composer_jax.realtime.batches.baselines import (
    FOLDS,
    RIDGE,
    SessionFacts,
    earlier_means,
    explained_variance,
    mean_by_session,
    ridge,
    shrinkage,
    standardised,
)
from composer_jax.realtime.labels.reward import BUCKET_USERS


def sessions(seed, n=300, users=40, buckets=3):
    """(mean returns, facts) of sessions of users who differ, in buckets that differ; one bucket is rare."""
    rng = np.random.default_rng(seed)
    user = rng.integers(0, users, n)
    bucket = np.where(rng.random(n) < 0.03, buckets, rng.integers(0, buckets, n))
    opened = rng.uniform(0, 1e5, n)
    values = 0.3 * rng.standard_normal(users)[user] + 0.2 * bucket + 0.5 * rng.standard_normal(n)
    return values, SessionFacts([f"u{i}" for i in user], [f"b{i}" for i in bucket], opened, opened + 5000.0)


def slow_shrinkage(values, facts):
    """Plain loops over the formulas of the module."""
    n = len(values)
    means = [slow_mean(values, facts, i, i) for i in range(n)]
    deviations = [value - mean for value, mean in zip(values, means, strict=True)]
    by_user = {}
    for user, deviation in zip(facts.users, deviations, strict=True):
        by_user.setdefault(user, []).append(deviation)
    k, total = len(by_user), statistics.fmean(deviations)
    within = math.fsum((d - statistics.fmean(own)) ** 2 for own in by_user.values() for d in own) / (n - k)
    between_square = math.fsum(len(own) * (statistics.fmean(own) - total) ** 2 for own in by_user.values()) / (k - 1)
    size = (n - math.fsum(len(own) ** 2 for own in by_user.values()) / n) / (k - 1)
    kappa = within / ((between_square - within) / size)
    out = []
    for i in range(n):
        own = [j for j in range(n) if facts.users[j] == facts.users[i] and j != i]
        deviations = [values[j] - slow_mean(values, facts, j, i) for j in own]
        out.append(means[i] + math.fsum(deviations) / (len(own) + kappa))
    return np.array(out), kappa


def slow_mean(values, facts, j, without):
    """The mean of the bucket of session j, or of all where it has few users, without one session."""
    same = [k for k in range(len(values)) if facts.buckets[k] == facts.buckets[j]]
    is_large = len({facts.users[k] for k in same}) >= BUCKET_USERS
    return statistics.fmean(values[k] for k in (same if is_large else range(len(values))) if k != without)


@pytest.mark.parametrize("seed", range(3))
def test_shrinkage_is_that_of_plain_loops(seed):
    values, facts = sessions(seed)
    found, kappa = shrinkage(values, facts)
    expected, expected_kappa = slow_shrinkage(values, facts)
    assert kappa == pytest.approx(expected_kappa) and 0.5 < kappa < 50
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_no_session_has_a_part_in_its_own_baseline():
    values, facts = sessions(4)
    kappa = shrinkage(values, facts)[1]
    for i in (0, 17):
        moved = values.copy()
        moved[i] += 1.0
        # kappa is one number of the whole batch; with it fixed the own return changes nothing.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(baselines, "variance_ratio", lambda *_: kappa)
            assert shrinkage(moved, facts)[0][i] == pytest.approx(shrinkage(values, facts)[0][i], abs=1e-12)
            assert not np.allclose(shrinkage(moved, facts)[0], shrinkage(values, facts)[0])


def test_users_who_do_not_differ_have_the_bucket_as_their_baseline():
    _, facts = sessions(5)
    values = np.random.default_rng(1).standard_normal(300)
    once = SessionFacts([f"u{i}" for i in range(300)], facts.buckets, facts.opened, facts.due)
    found, kappa = shrinkage(values, once)
    assert math.isinf(kappa)
    large = [i for i in range(300) if facts.buckets[i] == facts.buckets[0]]
    assert found[0] == pytest.approx(statistics.fmean(values[i] for i in large if i))
    with pytest.raises(UserError, match="a batch of 1 sessions has no baseline"):
        shrinkage(np.zeros(1), SessionFacts(["u"], ["b"], np.zeros(1), np.zeros(1)))


def test_earlier_means_see_only_what_was_known_when_a_session_opened():
    values, facts = sessions(6)
    centred = np.array([values[i] - slow_mean(values, facts, i, i) for i in range(300)])
    kappa, found = baselines.variance_ratio(centred, facts.users), earlier_means(values, facts)
    for i in range(0, 300, 7):
        same = [j for j in range(300) if facts.users[j] == facts.users[i]]
        known = [centred[j] for j in same if facts.due[j] <= facts.opened[i]]
        assert found[i] == pytest.approx(math.fsum(known) / (len(known) + kappa), abs=1e-12)


def answers(seed, n=300, features=4):
    """(returns, columns, session of each answer, facts): one to four answers a session."""
    values, facts = sessions(seed, n)
    rng = np.random.default_rng(seed)
    session = np.repeat(np.arange(n), rng.integers(1, 5, n))
    columns = rng.standard_normal((len(session), features)) * [1.0, 10.0, 0.1, 0.0] + [0.0, 50.0, 0.0, 3.0]
    returns = values[session] + columns @ [0.3, 0.02, 1.0, 5.0] + 0.2 * rng.standard_normal(len(session))
    return returns, columns, session, facts


@pytest.mark.parametrize("seed", range(3))
def test_ridge_is_that_of_least_squares_on_the_other_folds(seed):
    returns, columns, session, facts = answers(seed)
    found = ridge(returns, columns, session, facts)
    users = np.array(facts.users)[session]
    weights = 1 / np.bincount(session)[session]
    for fold, names in enumerate(np.array(sorted(set(facts.users)))[i::FOLDS] for i in range(FOLDS)):
        test = np.isin(users, names)
        x, y, w = columns[~test], returns[~test], weights[~test]
        mean = np.average(x, axis=0, weights=w)
        deviation = np.sqrt(np.average((x - mean) ** 2, axis=0, weights=w))
        varied = deviation > 1e-9
        standard = (x[:, varied] - mean[varied]) / deviation[varied]
        # Rows of sqrt(w) for the data, of sqrt(RIDGE) for the penalty, and a column for the constant.
        rows = np.column_stack([np.ones(len(y)), standard]) * np.sqrt(w)[:, None]
        penalty = np.sqrt(RIDGE) * np.eye(rows.shape[1])[1:]
        target = np.concatenate([y * np.sqrt(w), np.zeros(len(penalty))])
        fit = np.linalg.lstsq(np.vstack([rows, penalty]), target, rcond=None)[0]
        expected = fit[0] + (columns[test][:, varied] - mean[varied]) / deviation[varied] @ fit[1:]
        np.testing.assert_allclose(found[test], expected, rtol=1e-8, err_msg=f"fold {fold}")


def test_the_answers_of_a_user_have_no_part_in_their_prediction():
    returns, columns, session, facts = answers(3)
    found = ridge(returns, columns, session, facts)
    own = np.array(facts.users)[session] == facts.users[0]
    moved = np.where(own, returns + 5.0, returns)
    np.testing.assert_allclose(ridge(moved, columns, session, facts)[own], found[own])
    alone = SessionFacts(["u"] * 300, facts.buckets, facts.opened, facts.due)
    with pytest.raises(UserError, match="compares users, and the batch has one"):
        ridge(returns, columns, session, alone)
    with pytest.raises(UserError, match="not finite"):
        ridge(returns, columns * np.nan, session, facts)


def test_advantages_are_in_deviations_of_the_whole_batch():
    values = np.array([0.0, 1.0, -1.0, 40.0])
    np.testing.assert_allclose(standardised(values), values / values.std())
    assert not standardised(np.full(5, 0.1)).any()
    assert explained_variance(np.ones(3), np.zeros(3)) is None
    assert explained_variance(values, values / 2) == pytest.approx(0.75)


def test_baselines_leave_the_policy_gradient_as_it_is():
    """The mean of advantage * score over 300 batches, with both baselines and with the true mean, is the effect."""
    effect, differences = 0.3, {"shrinkage": [], "ridge": [], "truth": []}
    for seed in range(300):
        rng = np.random.default_rng(1000 + seed)
        n = 200
        user = rng.integers(0, 30, n)
        x = rng.standard_normal(n)
        mean = 0.4 * rng.standard_normal(30)[user] + 0.5 * x
        action = rng.random(n) < 0.3
        returns = mean + effect * action + 0.3 * rng.standard_normal(n)
        opened = np.sort(rng.uniform(0, 1e5, n))
        facts = SessionFacts([f"u{i}" for i in user], ["b"] * n, opened, opened + 3600.0)
        columns = np.column_stack([x, earlier_means(returns, facts)])
        found = {
            "shrinkage": shrinkage(returns, facts)[0],
            "ridge": ridge(returns, columns, np.arange(n), facts),
            "truth": mean + effect * 0.3,
        }
        for name, baseline in found.items():
            differences[name].append(float(((returns - baseline) * (action - 0.3)).mean()) - effect * 0.3 * 0.7)
    for name, values in differences.items():
        z = statistics.fmean(values) / (statistics.stdev(values) / len(values) ** 0.5)
        assert abs(z) < 4, (name, z)
    spread = {name: statistics.stdev(values) for name, values in differences.items()}
    assert spread["truth"] < spread["ridge"] < 1.5 * spread["truth"]


def test_means_of_sessions_are_over_their_answers():
    assert mean_by_session(np.array([1.0, 3.0, 5.0]), np.array([0, 0, 1]), 2).tolist() == [2.0, 5.0]
