"""Labels in numbers: intervals over users, shares of what is missing, and the rank correlation of two ages."""

import numpy as np
import pytest

from composer_jax.realtime.labels.signal_types import censored, observed, undefined
from composer_jax.realtime.labels.store import Label
from composer_jax.realtime.labels.summary import (
    clustered_interval,
    effective_users,
    format_summary,
    rank_correlations,
    summarize_labels,
    wilson,
)
from composer_jax.serve.traffic.records import SessionRecord


def made(name, keep, version=1, reward=0.0):
    signal = keep if not isinstance(keep, float) else observed(keep)
    return Label(name, 600.0, "1", "rules-1", 0.0, 1.0, "b", version, version, 0, reward, {}, {"keep": signal})


def record(name, user):
    return SessionRecord(name, "key", user, "", "", 0.0)


def test_rows_by_version_and_signal():
    labels = [made("a", 1.0), made("b", 0.0), made("c", censored("x")), made("d", undefined("y")), made("e", 1.0, 2)]
    records = [record(name, user) for name, user in zip("abcde", "uvuvw", strict=True)]
    rows = {(row.version, row.signal): row for row in summarize_labels(labels, records)}
    assert list(rows) == [("1", "reward"), ("1", "keep"), ("2", "reward"), ("2", "keep")]
    keep = rows["1", "keep"]
    assert (keep.sessions, keep.users, keep.effective_users) == (4, 2, 2)
    assert (keep.mean, keep.censored, keep.undefined) == (0.5, 0.25, 0.25)
    assert keep.low is not None and keep.low < 0.5
    assert (rows["2", "keep"].mean, rows["2", "keep"].low) == (1.0, None)  # one user has no interval
    assert len(format_summary(list(rows.values()))) == 5
    assert {row.sessions for row in summarize_labels(labels, records[:1])} == {1}  # the others are forgotten


def test_effective_users_count_equal_users():
    assert effective_users("aabbcc") == 3
    assert effective_users("a" * 8 + "bb") == pytest.approx(100 / 68)
    assert effective_users([]) == 0


def test_intervals_cover_the_mean_with_users_as_clusters():
    """95 % of the intervals hold the truth though users differ and have many sessions; single sessions would not do."""
    rng, hits, naive = np.random.default_rng(0), 0, 0
    for _ in range(400):
        means = rng.normal(size=60)
        owners = np.repeat(np.arange(60), rng.integers(1, 12, 60))
        values = means[owners] + rng.normal(size=len(owners))
        mean, low, high = clustered_interval(list(values), [str(owner) for owner in owners])
        hits += low < 0 < high
        half = 1.96 * values.std() / len(values) ** 0.5
        naive += abs(mean) < half
    assert 0.92 < hits / 400 < 0.98
    assert naive / 400 < 0.8


def test_wilson():
    assert wilson(0.0, 0) == (0.0, 1.0)
    low, high = wilson(0.0, 50)
    assert low == 0 and 0.05 < high < 0.09
    assert wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)


def test_rank_correlation_per_version():
    short = [made(f"s{i}", i / 10) for i in range(10)] + [made(f"t{i}", i / 10, 2) for i in range(10)]
    long = [made(f"s{i}", (i / 10) ** 3) for i in range(10)] + [made(f"t{i}", 1 - i / 10, 2) for i in range(10)]
    assert rank_correlations(short, long) == {"1": (pytest.approx(1), 10), "2": (pytest.approx(-1), 10)}
    ties = [made("a", 0.0), made("b", 0.0), made("c", 1.0), made("d", 1.0)]
    other = [made("a", 0.0), made("b", 1.0), made("c", 1.0), made("d", 1.0)]
    assert rank_correlations(ties, other) == {"1": (pytest.approx(0.57735, abs=1e-5), 4)}
    three = [made("a", 0.0), made("b", 0.5), made("c", 0.5), made("d", 1.0)]
    assert rank_correlations(other, three) == {"1": (pytest.approx(0.81650, abs=1e-5), 4)}
    assert rank_correlations(ties, [made(name, 0.5) for name in "abcd"]) == {}
    assert rank_correlations(ties[:2], other[:2]) == {}
