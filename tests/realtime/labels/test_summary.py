"""Labels in numbers: intervals over users, shares of what is missing, and the rank correlation of two ages."""

import numpy as np
import pytest

from composer_jax.realtime.labels.reward import RewardWeights
from composer_jax.realtime.labels.signal_table import SIGNALS
from composer_jax.realtime.labels.signal_types import censored, observed, undefined
from composer_jax.realtime.labels.store import Label
from composer_jax.realtime.labels.summary import (
    RankCorrelation,
    clustered_interval,
    effective_users,
    format_summary,
    rank_correlations,
    summarize_labels,
    summary_tables,
    wilson,
)


def made(name, keep, version=1, user="", start=0.0):
    signals = {one: undefined("nothing") for one in SIGNALS}
    signals |= {"keep": observed(keep) if isinstance(keep, float) else keep}
    return Label(name, user or name, 600.0, "1", "rules-1", start, 1.0, "b", version, version, 0, signals)


def test_rows_by_version_and_signal():
    values = [(f"s{i}", i % 2 / 1, f"u{i}") for i in range(6)] + [
        ("c", censored("x"), "u0"),
        ("d", undefined("y"), "u1"),
    ]
    labels = [made(name, keep, user=user) for name, keep, user in values] + [made("e", 1.0, 2)]
    rows = {(row.version, row.signal): row for row in summarize_labels(labels, RewardWeights(own={"keep": 2.0}))}
    assert [key for key in rows if key[1] in ("reward", "keep")] == [
        ("1", "reward"),
        ("1", "keep"),
        ("2", "reward"),
        ("2", "keep"),
    ]
    keep = rows["1", "keep"]
    assert (keep.sessions, keep.users, keep.effective_users) == (8, 6, 6)
    assert (keep.mean, keep.censored, keep.undefined) == (0.5, 1 / 8, 1 / 8)
    assert keep.low is not None and keep.low < 0.5
    assert (rows["2", "keep"].mean, rows["2", "keep"].low) == (1.0, None)  # one user has no interval
    assert rows["2", "reward"].mean == pytest.approx(0.0)  # relative to the median of both versions, which is 1
    assert rows["1", "reward"].mean == pytest.approx(-0.75)  # of six sessions with keep, three lie 2 below it
    assert len(format_summary(list(rows.values()))) == 1 + len(rows)
    assert "Censored sessions" in [table.title for table in summary_tables(list(rows.values()))]


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


@pytest.mark.parametrize("users", [5, 10])
def test_intervals_of_few_users_are_wide_enough(users):
    rng = np.random.default_rng(0)
    owners = [str(owner) for owner in range(users)]
    intervals = [clustered_interval(list(rng.normal(size=users)), owners) for _ in range(4000)]
    assert 0.94 < sum(low < 0 < high for _, low, high in intervals) / 4000 < 0.96
    assert clustered_interval([1.0, 2.0], ["a", "b"]) == (1.5, None, None)


def test_wilson():
    assert wilson(0.0, 0) == (0.0, 1.0)
    low, high = wilson(0.0, 50)
    assert low == 0 and 0.05 < high < 0.09
    assert wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)


def correlations(short, long):
    return {version: (one.correlation, one.sessions) for version, one in rank_correlations(short, long).items()}


def test_rank_correlation_per_version():
    short = [made(f"s{i}", i / 10) for i in range(10)] + [made(f"t{i}", i / 10, 2) for i in range(10)]
    long = [made(f"s{i}", (i / 10) ** 3) for i in range(10)] + [made(f"t{i}", 1 - i / 10, 2) for i in range(10)]
    assert correlations(short, long) == {"1": (pytest.approx(1), 10), "2": (pytest.approx(-1), 10)}
    ties = [made("a", 0.0), made("b", 0.0), made("c", 1.0), made("d", 1.0)]
    other = [made("a", 0.0), made("b", 1.0), made("c", 1.0), made("d", 1.0)]
    assert correlations(ties, other) == {"1": (pytest.approx(0.57735, abs=1e-5), 4)}
    three = [made("a", 0.0), made("b", 0.5), made("c", 0.5), made("d", 1.0)]
    assert correlations(other, three) == {"1": (pytest.approx(0.81650, abs=1e-5), 4)}
    assert rank_correlations(ties, [made(name, 0.5) for name in "abcd"]) == {}
    assert rank_correlations(ties[:2], other[:2]) == {}


def test_labels_that_start_at_different_edits_are_not_compared():
    short = [made(f"s{i}", i / 10) for i in range(6)]
    long = [made(f"s{i}", i / 10 if i < 4 else -1.0, start=0.0 if i < 4 else 99.0) for i in range(6)]
    assert rank_correlations(short, long) == {"1": RankCorrelation(pytest.approx(1), 4, 2)}
