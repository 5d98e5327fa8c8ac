"""What each answer was worth: terms of answers and of the session, and blame by hunks."""

import dataclasses
import math

import pytest

from composer_jax.realtime.batches.credit import AnswerPlace, answer_returns, not_overwritten
from composer_jax.realtime.labels.reward import RewardWeights, compute_rewards
from composer_jax.realtime.labels.signal_table import SIGNALS
from composer_jax.realtime.labels.signal_types import censored, observed
from composer_jax.realtime.labels.store import Label
from tests.realtime.labels.sessions import event, session, turn

WEIGHTS = RewardWeights()


def label(name="s", user="u", **signals):
    values = {one: censored("not measured") for one in SIGNALS} | signals
    return Label(name, user, 3600.0, "1-x", "rules", 0.0, 0.0, "change/small", 1, 1, 0, values)


def returns(own, others=(), places=(), weights=WEIGHTS, gamma=1.0):
    reward = compute_rewards([own, *others], weights)[own.session]
    return answer_returns(own, reward, places, weights, gamma), reward


def test_a_session_of_one_answer_gets_exactly_its_reward():
    one = label(
        keep_corrected=observed(0.75),
        follow_up=observed(-1.0, by_turn={"a1": -1.0}),
        undo=observed(1.0, by_turn={"a1": 1.0}),
        accept_share=observed(0.5, by_turn={"a1": 0.5}),
        invalid_calls=observed(0.2, by_turn={"a1": 0.2}),
        tokens=observed(500.0),
    )
    others = [
        label(f"o{i}", f"v{i}", keep_corrected=observed(0.5), follow_up=observed(0.0), undo=observed(0.0),
              tokens=observed(100.0 + i), accept_share=observed(1.0), invalid_calls=observed(0.0)) for i in range(5)
    ]  # fmt: skip
    found, reward = returns(one, others, [AnswerPlace("a1", 0)])
    assert found == [pytest.approx(reward.value)] and len([term for term in reward.terms.values() if term]) == 6
    clipped = dataclasses.replace(WEIGHTS, limit=0.1)
    assert returns(one, others, [AnswerPlace("a1", 0)], clipped)[0] == [-0.1]


def test_parts_by_answer_go_to_their_answers_and_the_rest_to_all():
    one = label(
        keep_corrected=observed(1.0),
        follow_up=observed(0.0, by_turn={"a1": -1.0, "a3": 1.0}),
        undo=observed(1.0, by_turn={"a2": 1.0}),
    )
    other = label("t", "v", keep_corrected=observed(0.0), follow_up=observed(0.5), undo=observed(0.0))
    places = [AnswerPlace("a1", 2), AnswerPlace("a2", 1), AnswerPlace("a3", 0), AnswerPlace("", 1)]
    # Centres of the two users: keep 0.5, follow_up 0.25, undo 0.5.
    kept, undone, not_undone = 0.5, -0.5 * (1 - 0.5), -0.5 * (0 - 0.5)
    expected = [
        kept + 0.5 * (-1 - 0.25) + not_undone,
        kept + undone,  # no message followed a2: nothing is known of it
        kept + 0.5 * (1 - 0.25) + not_undone,
        kept,  # a summary
    ]
    assert returns(one, [other], places)[0] == pytest.approx(expected)
    discounted = [value - kept + kept * 0.5**place.later for value, place in zip(expected, places, strict=True)]
    assert returns(one, [other], places, gamma=0.5)[0] == pytest.approx(discounted)


def test_terms_without_parts_are_of_the_session():
    """An undo that nobody saw has no value, and one that did not happen has no part."""
    weights = dataclasses.replace(WEIGHTS, own={"tests": 0.3})
    one = label(undo=observed(0.0), tests=observed(1.0), tokens=observed(200.0))
    other = label("t", "v", undo=observed(1.0), tests=observed(0.0), tokens=observed(100.0))
    found, _ = returns(one, [other], [AnswerPlace("a1", 1), AnswerPlace("a2", 0)], weights)
    cost = -0.05 * (math.log(200 / 150) - math.log(200 / 150) / 2)
    assert found == [pytest.approx(0.25 + 0.3 * 0.5 + cost)] * 2


def test_the_kept_lines_of_an_answer_are_those_that_the_agent_did_not_overwrite():
    one, other = label(keep_corrected=observed(1.0)), label("t", "v", keep_corrected=observed(0.0))
    places = [AnswerPlace("a1", 1, 0.25), AnswerPlace("a2", 0)]
    assert returns(one, [other], places)[0] == pytest.approx([0.125, 0.5])


ANSWERS = [turn("a1", 100, "Fix it"), turn("a2", 200, "And that"), turn("a3", 300, "And"), turn("a4", 400, "Thanks")]


@pytest.mark.parametrize(
    ("events", "shares"),
    [
        ([], [1, 1, 1, 1]),
        ([("shown", 101, "a1", "ab"), ("shown", 201, "a2", "cd")], [1, 1, 1, 1]),
        ([("shown", 101, "a1", "abcd"), ("shown", 201, "a2", "ab"), ("shown", 301, "a3", "c")], [0.25, 1, 1, 1]),
        # Rejected before a later answer showed hunks, or after the last one did.
        ([("shown", 101, "a1", "ab"), ("rejected", 150, "a1", "a"), ("shown", 201, "a2", "c")], [0.5, 1, 1, 1]),
        ([("shown", 101, "a1", "ab"), ("shown", 201, "a2", "c"), ("undo", 250, "a1", "a")], [1, 1, 1, 1]),
        ([("shown", 101, "a1", "ab"), ("rejected", 150, "a1", "a")], [1, 1, 1, 1]),
        # The last word about a hunk counts, and an event without an answer is about the one before it.
        (
            [
                ("shown", 101, "a1", "ab"),
                ("rejected", 150, "", "a"),
                ("accepted", 151, "", "a"),
                ("shown", 201, "", "c"),
            ],
            [1, 1, 1, 1],
        ),
        ([("shown", 101, "", "ab"), ("undo", 150, "", "ab"), ("shown", 301, "", "ac")], [0, 1, 1, 1]),
        ([("shown", 101, "a1", "ab"), ("shown", 201, "foreign", "ab")], [1, 1, 1, 1]),
    ],
)
def test_blame_by_hunks(events, shares):
    rows = [event(kind, time, about, hunks=list(hunks)) for kind, time, about, hunks in events]
    assert not_overwritten(session(ANSWERS, rows), ANSWERS) == shares
