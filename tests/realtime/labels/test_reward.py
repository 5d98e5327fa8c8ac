"""Rewards are sums of signals relative to a fixed set of labels, in which nobody moves others far."""

import math

import pytest

from composer_jax.errors import UserError
from composer_jax.realtime.labels.edits import EDIT_LINES, edit_weight
from composer_jax.realtime.labels.reward import BUCKET_USERS, RewardWeights, compute_rewards
from composer_jax.realtime.labels.signal_table import SIGNALS
from composer_jax.realtime.labels.signal_types import LabelContext, censored, observed, undefined
from composer_jax.realtime.labels.store import Label
from tests.realtime.labels.sessions import H, measured, session, turn


def made(name, bucket="b", user="", **values):
    signals = {name: undefined("nothing") for name in SIGNALS} | {k: observed(v) for k, v in values.items()}
    return Label(name, user or f"user of {name}", H, "1", "rules-1", 0.0, 1.0, bucket, 1, 1, 0, signals)


def terms_of(labels, weights=None):
    return {session: reward.terms for session, reward in compute_rewards(labels, weights).items()}


def test_the_reward_is_the_weighted_sum_of_what_was_seen():
    good = dict(keep_corrected=0.9, accept_share=1.0, follow_up=1, undo=0, invalid_calls=0.5, tokens=200)
    bad = dict(keep_corrected=0.1, accept_share=0.0, follow_up=-1, undo=1, needless_question=1, tokens=800)
    labels = [made("good", **good), made("bad", **bad), made("cheap", tokens=100), made("usual", tokens=200)]
    terms = terms_of([*labels, made("missing")])
    excess = math.log(4)
    assert terms["good"] == pytest.approx(
        {
            "keep_corrected": 0.4,
            "follow_up": 0.5,
            "accept_share": 0.125,
            "undo": 0.25,
            "invalid_calls": 0,
            "needless_question": 0,
            "cost": 0.05 * excess / 4,
        }
    )
    assert terms["bad"]["cost"] == pytest.approx(-0.05 * (excess - excess / 4))
    assert terms["cheap"] == terms["usual"]  # cheaper than the median earns nothing more
    assert set(terms["missing"].values()) == {0.0}


def test_what_is_missing_is_worth_as_much_as_the_mean():
    """A client that reports no undo has no advantage over one that does."""
    labels = [
        made(f"s{i}", undo=i % 2, follow_up=-1, invalid_calls=0.5, needless_question=1, tokens=9) for i in range(6)
    ]
    rewards = compute_rewards([*labels, made("missing")])
    assert math.fsum(rewards[label.session].value for label in labels) == pytest.approx(0, abs=1e-12)
    assert rewards["missing"].value == 0


def test_rewards_are_clipped():
    labels = [made(f"s{i}", follow_up=1) for i in range(9)] + [made("bad", follow_up=-1, undo=1)]
    rewards = compute_rewards(labels, RewardWeights(follow_up=9.0, limit=1.5))
    assert rewards["bad"].value == -1.5
    assert rewards["s0"].value == 1.5
    assert rewards["bad"].terms["follow_up"] == pytest.approx(9 * -1.8)


def test_terms_are_relative_to_their_bucket_if_enough_users_are_in_it():
    """The centre of a bucket with few users is that of all 42 users, and not its own."""
    easy = [made(f"e{i}", "easy", keep_corrected=1.0) for i in range(BUCKET_USERS)]
    hard = [made(f"h{i}", "hard", keep_corrected=0.0) for i in range(BUCKET_USERS)]
    few = [made(f"f{i}", "few", keep_corrected=0.9) for i in range(2)]
    terms = terms_of([*easy, *hard, *few])
    for name, term in (("e0", 0.0), ("h0", 0.0), ("f0", 0.9 - 21.8 / 42)):
        assert terms[name]["keep_corrected"] == pytest.approx(term)


def test_a_user_counts_once_in_a_centre():
    busy = [made(f"b{i}", user="busy", keep_corrected=0.0) for i in range(99)]
    terms = terms_of([*busy, made("other", keep_corrected=1.0)])
    assert terms["other"]["keep_corrected"] == pytest.approx(0.5)


def test_own_weights_and_costs():
    thumbs = [made(f"s{i}", thumb=value) for i, value in enumerate((-1.0, 1.0, 1.0))]
    thumbs[0].signals["smiles"] = thumbs[1].signals["smiles"] = thumbs[2].signals["smiles"] = censored("x")
    weights = RewardWeights(own={"thumb": 0.2, "smiles": 1.0})
    terms = terms_of(thumbs, weights)
    assert [terms[f"s{i}"]["own.thumb"] for i in range(3)] == pytest.approx([-0.4, 0, 0])
    assert {one["own.smiles"] for one in terms.values()} == {0.0}
    for bad in ({"keep": -1.0}, {"cost_signal": "euros"}, {"limit": float("nan")}, {"own": {"x": float("inf")}}):
        with pytest.raises(UserError):
            RewardWeights(**bad)
    with pytest.raises(UserError, match="smiles"):
        compute_rewards([made("s")], RewardWeights(own={"smiles": 1.0}))
    assert compute_rewards([], weights) == {}


def test_one_user_hardly_moves_the_rewards_of_others():
    """Forged counts and many sessions of one user against 40 others, with the unbounded signal in the reward."""
    weights = RewardWeights(own={"edit_weight": 1.0})
    victims = [made(f"v{i}", keep_corrected=i % 2, follow_up=i % 2, edit_weight=2 + i % 2) for i in range(40)]
    lines = measured(100 + H, added=10**9, added_kept=10**9)
    weight = edit_weight(session([turn("a1", 100, "Fix it")], [lines]), H, LabelContext()).value
    assert weight == math.log1p(EDIT_LINES)
    forged = dict(keep_corrected=1, follow_up=1, edit_weight=weight)
    attack = [made(f"x{i}", user="attacker", **forged) for i in range(100)]
    before, after = compute_rewards(victims, weights), compute_rewards([*victims, *attack], weights)
    # Means of 41 users move by at most (1 + 0.5) / 2 / 41, and the median of weights by half a step at most.
    moved = [abs(after[one.session].value - before[one.session].value) for one in victims]
    assert max(moved) < 0.02 + 0.5
    without_size = RewardWeights()
    before, after = compute_rewards(victims, without_size), compute_rewards([*victims, *attack], without_size)
    assert max(abs(after[one.session].value - before[one.session].value) for one in victims) < 0.02
