"""What an episode is worth."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_jax.agent.effort import EffortConfig, EffortLevel
from composer_jax.agent.usage import EpisodeUsage
from composer_jax.rl.penalties import BEHAVIORS
from composer_jax.rl.rewards import RewardConfig, bounded_cost, length_cost, reward_parts, weighted_length
from tests.rl.made_up import conversation, episode


def parts_of(one, config):
    """The parts of the only episode of a group."""
    (parts,) = reward_parts([one], config)
    return parts


@pytest.mark.parametrize(
    ("k", "q", "closed_form"),
    [
        (1.0, 0.0, lambda x: x),
        (3.0, 0.0, lambda x: x),
        (2.0, 1.0, lambda x: math.log(1 + 2 * x) / 2),
        (2.0, 0.5, lambda x: math.sqrt(1 + 2 * x) - 1),
        (2.0, 2.0, lambda x: (1 - 1 / (1 + 2 * x)) / 2),
    ],
)
def test_length_cost_has_its_closed_forms(k, q, closed_form):
    for x in (0.0, 0.1, 1.0, 7.5, 300.0):
        assert length_cost(x, k=k, q=q) == pytest.approx(closed_form(x), abs=1e-12)


@pytest.mark.parametrize("q", [0.0, 0.5, 0.9, 1.0, 1.5, 3.0])
@pytest.mark.parametrize("k", [0.2, 1.0, 5.0])
def test_length_cost_rises_from_zero_with_slope_one_and_bends_down(k, q):
    h = 1e-6
    assert length_cost(0.0, k=k, q=q) == 0
    assert length_cost(h, k=k, q=q) / h == pytest.approx(1, rel=1e-4)
    for x in (0.5, 2.0, 20.0):
        slope = (length_cost(x + h, k=k, q=q) - length_cost(x - h, k=k, q=q)) / (2 * h)
        assert slope == pytest.approx((1 + k * x) ** -q, rel=1e-4)
    steps = [length_cost(x + 1, k=k, q=q) - length_cost(x, k=k, q=q) for x in range(5)]
    assert all(a >= b - 1e-12 for a, b in zip(steps, steps[1:], strict=False)) and steps[-1] > 0


def test_length_cost_is_continuous_at_one_and_saturates_above():
    assert length_cost(4.0, k=2.0, q=1 + 1e-7) == pytest.approx(length_cost(4.0, k=2.0, q=1), rel=1e-5)
    assert length_cost(1e12, k=2.0, q=1.5) == pytest.approx(1 / (2 * 0.5), rel=1e-4)


USAGE = EpisodeUsage(
    thinking_tokens=100, call_tokens=30, output_tokens=500, final_tokens=20, calls={"read": 3}, malformed_calls=1
)


@pytest.mark.parametrize(
    ("weight", "count"),
    [
        ("thinking_token", 100),
        ("call_token", 30),
        ("output_token", 500),
        ("final_token", 20),
        ("call", 4),
        ("turn", 3),
        ("summary_token", 4),
    ],
)
def test_each_of_the_seven_lengths_has_a_weight(weight, count):
    solved = episode(1.0, conversation(0, turns=1, summaries=2), turns=3, summaries=2, usage=USAGE)
    config = RewardConfig(weight=0.1, **{"summary_token": 0.0, weight: 0.02}, k=2.0, q=1.0)
    assert weighted_length(solved, config) == pytest.approx(0.02 * count)
    assert parts_of(solved, config).length_cost == pytest.approx(0.1 * math.log(1 + 2 * 0.02 * count) / 2)


def test_lengths_add_up_before_the_cost_bends():
    solved = episode(1.0, turns=3, usage=USAGE)
    config = RewardConfig(
        weight=0.02, thinking_token=1e-3, call_token=1e-3, output_token=1e-4, final_token=1e-3, call=0.05, turn=0.5
    )
    x = (100 + 30 + 0.1 * 500 + 20) / 1000 + 0.05 * 4 + 0.5 * 3
    assert parts_of(solved, config).length_cost == pytest.approx(0.02 * 2 * (math.sqrt(1 + x) - 1))


def test_what_costs_nothing():
    config = RewardConfig(weight=0.1, summary_token=0.5, turn=0.25, k=1.0, q=0.0)
    failed = episode(0.0, conversation(0, turns=1, summaries=2), turns=3, summaries=2)
    assert parts_of(failed, config).reward == 0
    assert parts_of(episode(1.0, turns=100), RewardConfig()).reward == 1.0, "there is no weight by default"
    with pytest.raises(ValueError, match="never graded"):
        reward_parts([episode(1.0), episode(None)], RewardConfig())


def test_every_part_of_the_reward_is_known_by_itself():
    long = parts_of(episode(1.0, turns=3), RewardConfig(weight=0.5, summary_token=0.0, turn=0.1, q=0.0))
    assert (long.grade, long.gap, long.penalties) == (1.0, 1.0, {})
    assert long.length_cost == pytest.approx(0.15) and long.reward == pytest.approx(0.85)


# -- costs and grades ---------------------------------------------------------------------------------------------

COUNTS = st.integers(0, 10**7)
PRICE = st.one_of(st.just(0.0), st.floats(0.0, 1e6))
GRADES = st.one_of(
    st.sampled_from([0.0, 1.0]),
    st.integers(1, 60).flatmap(lambda n: st.integers(0, n).map(lambda k: k / n)),
    st.floats(0.0, 1.0).map(lambda grade: round(grade, 3)),
)


@st.composite
def episodes(draw):
    """An episode of any grade, any counts and any behaviour."""
    counts = {field.name: draw(COUNTS) for field in dataclasses.fields(EpisodeUsage) if field.type in ("int", int)}
    counts |= {"todos": counts["unfinished_todos"], "added_lines": counts["comment_lines"]}  # behaviours up to 1
    calls = {"shell": max(1, counts["shell_duplicates"])}
    usage = EpisodeUsage(**counts, calls=calls, asked_question=draw(st.booleans()))
    effort = draw(st.sampled_from(["", "low"]))
    return episode(draw(GRADES), CONVERSATION, turns=draw(COUNTS), usage=usage, effort=effort)


CONVERSATION = conversation(0, turns=1, summaries=2)
CONFIGS = st.builds(
    RewardConfig,
    weight=PRICE,
    thinking_token=PRICE,
    output_token=PRICE,
    turn=PRICE,
    summary_token=PRICE,
    k=st.floats(1e-3, 1e3),
    q=st.floats(0.0, 3.0),
    penalties=st.fixed_dictionaries(dict.fromkeys(BEHAVIORS, PRICE)),
    effort=st.just(EffortConfig(levels={"low": EffortLevel(length_factor=3.0)})),
)


@given(st.lists(episodes(), min_size=1, max_size=6), CONFIGS)
def test_a_higher_grade_has_the_higher_reward_whatever_it_cost(group, config):
    """Also against a failure, grade 0, in another group."""
    parts = reward_parts(group, config)
    for one, other in itertools.permutations(parts, 2):
        if one.grade > other.grade:
            assert one.reward > other.reward
            assert one.reward - other.reward >= 0.2 * (one.grade - other.grade)
    for part in parts:
        assert part.reward <= part.grade
        assert (part.reward > 0) if part.grade else (part.reward <= 0)


@given(st.lists(episodes(), min_size=2, max_size=6), CONFIGS)
def test_of_equal_grades_the_one_that_costs_more_has_no_higher_reward(group, config):
    parts = reward_parts([dataclasses.replace(one, reward=group[0].reward) for one in group], config)
    for one, other in itertools.permutations(parts, 2):
        if one.length_cost + one.penalty > other.length_cost + other.penalty:
            assert one.reward <= other.reward


@given(st.floats(0.0, 1.0), st.floats(1e-6, 1.0))
def test_costs_up_to_half_of_the_gap_are_paid_in_full(fraction, gap):
    cost = 0.5 * fraction * gap
    assert bounded_cost(cost, gap) == cost


def test_larger_costs_bend_without_a_kink_and_rise_below_three_quarters():
    assert bounded_cost(0.5 + 1e-6, 1.0) - 0.5 == pytest.approx(1e-6, rel=1e-4)
    assert bounded_cost(0.75, 1.0) == pytest.approx(0.5 + 0.25 / 2)
    values = [bounded_cost(cost, 1.0) for cost in (0.5, 0.6, 1.0, 10.0, 1000.0)]
    assert values == sorted(set(values)) and values[-1] < 0.75
    assert bounded_cost(math.inf, 1.0) == 0.75


def test_the_bound_follows_the_next_lower_grade_of_the_group():
    """Ten turns cost 10 each: the grades 1, 0.6, 0.5 and 0 are 0.4, 0.1, 0.5 and nothing above the next lower one."""
    config = RewardConfig(weight=1.0, turn=1.0, summary_token=0.0, q=0.0)
    parts = reward_parts([episode(grade, turns=10) for grade in (1.0, 0.6, 0.5, 0.0, 0.5)], config)
    assert [part.gap for part in parts] == pytest.approx([0.4, 0.1, 0.5, math.inf, 0.5])
    assert [part.is_bounded for part in parts] == [True, True, True, False, True]
    assert [part.reward for part in parts] == pytest.approx([0.7, 0.525, 0.125, 0.0, 0.125], abs=0.01)
