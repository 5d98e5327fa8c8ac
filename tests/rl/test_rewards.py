"""What an episode is worth."""

import math

import pytest

from composer_jax.agent.usage import EpisodeUsage
from composer_jax.errors import UserError
from composer_jax.rl.rewards import RewardConfig, length_cost, reward_parts, weighted_length
from tests.rl.made_up import conversation, episode


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


CONFIG = RewardConfig(weight=0.1, summary_token=0.5, turn=0.25, k=1.0, q=0.0)


def test_a_solved_episode_pays_for_its_summaries_and_turns():
    """Two summaries of two tokens and three turns."""
    solved = episode(1.0, conversation(0, turns=1, summaries=2), turns=3, summaries=2)
    assert solved.summary_tokens == 4
    assert reward_parts(solved, CONFIG).reward == pytest.approx(1 - 0.1 * (0.5 * 4 + 0.25 * 3))


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
    assert reward_parts(solved, config).length_cost == pytest.approx(0.1 * math.log(1 + 2 * 0.02 * count) / 2)


def test_lengths_add_up_before_the_cost_bends():
    solved = episode(1.0, turns=3, usage=USAGE)
    config = RewardConfig(
        weight=0.02, thinking_token=1e-3, call_token=1e-3, output_token=1e-4, final_token=1e-3, call=0.05, turn=0.5
    )
    x = (100 + 30 + 0.1 * 500 + 20) / 1000 + 0.05 * 4 + 0.5 * 3
    assert reward_parts(solved, config).length_cost == pytest.approx(0.02 * 2 * (math.sqrt(1 + x) - 1))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weight": -0.1}, "rl.reward.weight=-0.1 is negative"),
        ({"call_token": -1.0}, "rl.reward.call_token=-1.0 is negative"),
        ({"q": -0.5}, "rl.reward.q=-0.5 is negative"),
        ({"k": 0.0}, "rl.reward.k=0.0; it must be positive"),
    ],
)
def test_impossible_weights_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        RewardConfig(**values)


def test_a_failed_episode_pays_nothing():
    failed = episode(0.0, conversation(0, turns=1, summaries=2), turns=3, summaries=2)
    assert reward_parts(failed, CONFIG).reward == 0


def test_without_a_weight_the_grade_is_the_reward():
    assert reward_parts(episode(1.0, turns=100), RewardConfig()).reward == 1.0


def test_an_episode_that_was_never_graded_has_no_reward():
    with pytest.raises(ValueError, match="never graded"):
        reward_parts(episode(None), RewardConfig())


def test_flags_make_an_episode_worth_nothing_only_where_they_are_named():
    caught = episode(1.0, flags=["reads_caches: shell: a.pyc"])
    assert reward_parts(caught, RewardConfig()).reward == 1.0
    assert reward_parts(caught, RewardConfig(zeroed=("exits",))).reward == 1.0
    assert reward_parts(caught, RewardConfig(zeroed=("exits", "reads_caches"))).reward == 0.0
    with pytest.raises(UserError, match="'cheats', which is no flag; use some of edits_tests"):
        RewardConfig(zeroed=("cheats",))


def test_every_part_of_the_reward_is_known_by_itself():
    long = reward_parts(episode(1.0, turns=3), RewardConfig(weight=0.5, summary_token=0.0, turn=0.1, q=0.0))
    assert (long.grade, long.zeroed) == (1.0, False)
    assert long.length_cost == pytest.approx(0.15) and long.reward == pytest.approx(0.85)
