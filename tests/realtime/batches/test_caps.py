"""Caps: every share is within its cap, no weight can be raised, and what one organisation can do is bounded."""

import re

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from composer_jax.errors import UserError
from composer_jax.realtime.batches.caps import LEAST_PART, Cap, cap_weights, effective_sample_size, largest_shares

NAMES = ("cap_user", "cap_repository", "cap_organisation")


def shares_within(tokens, weights, caps, slack=1e-9):
    """Whether every share is within its cap."""
    weighted = weights * tokens
    return all((cap.totals(weighted) <= cap.share * weighted.sum() * (1 + slack)).all() for cap in caps)


SESSIONS = st.lists(
    st.tuples(st.integers(1, 1000), st.integers(0, 30), st.integers(-1, 12), st.integers(-1, 4)),
    min_size=5,
    max_size=80,
)
SHARES = st.tuples(st.floats(0.05, 1), st.floats(0.1, 1), st.floats(0.25, 1))


QUICK = {"deadline": None, "phases": (Phase.explicit, Phase.generate), "derandomize": True}


@settings(max_examples=150, **QUICK)
@given(SESSIONS, SHARES)
def test_shares_are_within_their_caps_and_no_weight_can_be_raised(sessions, shares):
    tokens, *groups = (np.array(column) for column in zip(*sessions, strict=True))
    caps = [Cap(name, share, group) for name, share, group in zip(NAMES, shares, groups, strict=True)]
    try:
        weights = cap_weights(tokens, caps)
    except UserError as error:
        said = dict(re.findall(r"(cap_\w+)=([\d.]+) in place", str(error)))
        assert said
        working = [Cap(cap.name, float(said.get(cap.name, cap.share)), cap.groups) for cap in caps]
        assert cap_weights(tokens, working) @ tokens >= LEAST_PART * tokens.sum()
        return
    assert (weights >= 0).all() and (weights <= 1).all() and shares_within(tokens, weights, caps)
    assert all(share <= cap.share * (1 + 1e-9) or cap.share >= 1 for cap, share in zip(
        caps, largest_shares(tokens, weights, caps).values(), strict=True))  # fmt: skip
    for i in np.flatnonzero(weights < 1 - 1e-6):
        raised = weights.copy()
        raised[i] = min(1.0, raised[i] + 1e-3 + 1e-2 * raised[i])
        assert not shares_within(tokens, raised, caps, slack=1e-7)


@settings(max_examples=50, **QUICK)
@given(st.lists(st.integers(1, 500), min_size=3, max_size=12), st.floats(0.2, 0.9))
def test_of_one_kind_of_cap_no_other_weights_leave_more(tokens, share):
    """Brute force: the largest total W with sum over users of min(T, c W) >= W, on a fine grid."""
    tokens = np.array(tokens, float)
    caps = [Cap("cap_user", share, np.arange(len(tokens)))]
    grid = np.linspace(0, 1, 20_001)[1:] * tokens.sum()
    possible = grid[np.minimum(tokens, share * grid[:, None]).sum(1) >= grid * (1 - 1e-9)]
    best = possible.max(initial=0.0)
    if best < LEAST_PART * tokens.sum():
        with pytest.raises(UserError, match="cap_user"):
            cap_weights(tokens, caps)
    else:
        total = cap_weights(tokens, caps) @ tokens
        assert best - 1e-6 <= total <= best + tokens.sum() / 20_000 + 1e-6


def test_without_a_heavy_group_all_weights_are_one():
    tokens = np.full(200, 50.0)
    caps = [Cap.of("cap_user", 0.01, [f"u{i // 2}" for i in range(200)]), Cap.of("cap_repository", 0.02, [""] * 200)]
    assert cap_weights(tokens, caps).tolist() == [1.0] * 200


@pytest.mark.parametrize(("groups", "share"), [(5, 0.2), (100, 0.01)])
@pytest.mark.parametrize("seed", range(20))
def test_as_many_groups_as_shares_fit_exactly(groups, share, seed):
    rng = np.random.default_rng(seed)
    names = [f"g{i}" for i in rng.permutation(np.repeat(np.arange(groups), 4))]
    tokens = rng.integers(50, 200, len(names)).astype(float)
    cap = Cap.of("cap_user", share, names)
    weights = cap_weights(tokens, [cap])
    least = cap.totals(tokens).min()  # of the group that keeps all of it, to which the others are brought down
    np.testing.assert_allclose(cap.totals(weights * tokens), least, rtol=1e-9)


def test_caps_that_leave_nothing_are_refused_with_ones_that_work():
    users = [f"u{i % 12}" for i in range(48)]
    caps = [Cap.of("cap_user", 0.01, users), Cap.of("cap_organisation", 0.2, ["one"] * 48)]
    with pytest.raises(UserError) as error:
        cap_weights(np.full(48, 10.0), caps)
    assert "leave 0% of the trained tokens" in str(error.value)
    assert "cap_user=0.084 in place of 0.01 (12 share all sessions)" in str(error.value)
    assert "cap_organisation=1 in place of 0.2 (1 share all sessions)" in str(error.value)


def test_the_effective_sample_size_counts_users_by_their_weighted_tokens():
    tokens, users = np.array([10.0, 10.0, 20.0]), ["a", "a", "b"]
    assert effective_sample_size(tokens, np.ones(3), users) == pytest.approx(2.0)
    assert effective_sample_size(tokens, np.array([1.0, 1.0, 0.0]), users) == pytest.approx(1.0)
    assert effective_sample_size(tokens, np.array([1.0, 1.0, 0.5]), users) == pytest.approx(900 / 500)


@pytest.mark.parametrize("part", [0.1, 0.3, 0.9])
def test_an_organisation_moves_a_batch_by_no_more_than_its_cap(part):
    """It has a part of the traffic and extreme advantages; the others have ordinary ones."""
    rng, limit, share = np.random.default_rng(0), 3.0, 0.2
    n = 4000
    organisation = np.where(rng.random(n) < part, "one", "")
    tokens = rng.integers(50, 500, n).astype(float)
    advantages = np.where(organisation == "one", limit, np.clip(rng.standard_normal(n), -limit, limit))
    users = [f"u{i}" for i in rng.integers(0, 800, n)]
    weights = cap_weights(tokens, [Cap.of("cap_user", 0.01, users), Cap.of("cap_organisation", share, organisation)])
    moved, total = weights * np.abs(advantages) * tokens, weights @ tokens
    of_one = moved[organisation == "one"].sum()
    assert of_one <= limit * share * total * (1 + 1e-9)
    assert of_one / moved.sum() <= limit * share / (moved.sum() / total) * (1 + 1e-9)
    uncapped = np.abs(advantages[organisation == "one"]) @ tokens[organisation == "one"]
    if part > share:
        assert of_one == pytest.approx(limit * share * total) and of_one < 0.7 * uncapped
