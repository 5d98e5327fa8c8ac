"""Group advantages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_jax.rl.algorithm import GroupAdvantage

REWARDS = st.lists(st.floats(-10, 10, allow_nan=False), min_size=2, max_size=16)


@given(REWARDS)
def test_advantages_are_distances_from_the_mean_and_sum_to_zero(rewards):
    advantages = GroupAdvantage()(rewards)
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages, np.array(rewards) - np.mean(rewards), atol=1e-5)
    assert abs(advantages.astype(np.float64).sum()) < 1e-5 * len(rewards) * 10


@given(st.floats(-10, 10, allow_nan=False), st.integers(1, 16))
def test_equal_rewards_have_exactly_no_advantage(reward, n):
    """Also rewards such as 0.1, whose mean is not exactly the reward."""
    assert not GroupAdvantage()([reward] * n).any()
    assert not GroupAdvantage(leave_one_out=True)([reward] * n).any()


def test_equal_rewards_have_no_advantage_though_their_mean_is_rounded():
    assert np.mean([0.1] * 3) != 0.1
    assert not GroupAdvantage()([0.1] * 3).any()


def test_one_episode_has_no_baseline():
    np.testing.assert_array_equal(GroupAdvantage()([1.0]), [0.0])
    assert GroupAdvantage()([]).shape == (0,)


def test_small_differences_stay_small():
    """No division by the standard deviation."""
    np.testing.assert_allclose(GroupAdvantage()([0.5, 0.501]), [-0.0005, 0.0005], rtol=1e-4)


@given(REWARDS)
def test_leave_one_out_baseline_is_the_mean_of_the_other_rewards(rewards):
    advantages = GroupAdvantage(leave_one_out=True)(rewards)
    if len(set(rewards)) > 1:
        others = [(sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
        np.testing.assert_allclose(advantages, np.array(rewards) - others, atol=1e-4)


def test_advantages_of_binary_rewards():
    np.testing.assert_allclose(GroupAdvantage()([1, 0, 0, 0]), [0.75, -0.25, -0.25, -0.25])
    assert GroupAdvantage()([1, 0]).tolist() == pytest.approx([0.5, -0.5])
