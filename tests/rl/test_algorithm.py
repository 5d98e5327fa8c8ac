"""Group advantages."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from composer_jax.errors import UserError
from composer_jax.rl.algorithm import GroupAdvantage, make_algorithm
from composer_jax.rl.batch import Group, WeightedRow
from composer_jax.rl.policy_update import weighted_rows
from composer_jax.schema.run_config import run_config
from launch import flags
from tests.rl.made_up import conversation, episode

REWARDS = st.lists(st.floats(-10, 10, allow_nan=False), min_size=2, max_size=16)


@given(REWARDS)
@example([0.5, 0.501])
def test_advantages_are_distances_from_the_mean_and_sum_to_zero(rewards):
    advantages = GroupAdvantage()(rewards)
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages, np.array(rewards) - np.mean(rewards), atol=1e-5)
    assert abs(advantages.astype(np.float64).sum()) < 1e-5 * len(rewards) * 10


@given(st.floats(-10, 10, allow_nan=False), st.integers(0, 16))
@example(0.1, 3)
def test_equal_rewards_have_exactly_no_advantage(reward, n):
    """Also rewards such as 0.1, whose mean is not exactly the reward; one episode has no baseline."""
    assert GroupAdvantage()([reward] * n).tolist() == [0] * n
    assert not GroupAdvantage(leave_one_out=True)([reward] * n).any()


@given(REWARDS)
def test_leave_one_out_baseline_is_the_mean_of_the_other_rewards(rewards):
    advantages = GroupAdvantage(leave_one_out=True)(rewards)
    if len(set(rewards)) > 1:
        others = [(sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
        np.testing.assert_allclose(advantages, np.array(rewards) - others, atol=1e-4)


# -- the two forms of an algorithm --------------------------------------------------------------------------------

REWARDED = Group([episode(r, conversation(100 * i, summaries=i)) for i, r in enumerate([1.0, 0.0])], [1.0, 0.0])


class HalfBaseline:
    """The simple form."""

    def __call__(self, rewards):
        return np.asarray(rewards, np.float32) - 0.5


class SummariesOnly:
    """The general form: only the last trained token of a row has an advantage, and odd steps imitate all of them."""

    def weigh(self, group, step):
        return [
            [
                WeightedRow.of(
                    row, reward, weight=np.arange(len(row.tokens)) == len(row.tokens) - 1, ce_weight=step % 2
                )
                for row in one.transcript.rows()
            ]
            for one, reward in zip(group.episodes, group.rewards, strict=True)
        ]


def own(kind):
    return make_algorithm(f"{__name__}:{kind}", {})


def test_a_function_of_rewards_gives_every_trained_token_of_an_episode_its_advantage():
    (rows,) = weighted_rows([REWARDED], own("HalfBaseline"))
    assert len(rows) == 1 + 2
    for row, advantage in zip(rows, [0.5, -0.5, -0.5], strict=True):
        np.testing.assert_array_equal(row.advantages, np.where(row.row.trained, np.float32(advantage), 0))
        np.testing.assert_array_equal(row.weights, row.row.trained)
        np.testing.assert_array_equal(row.kl_weights, row.row.trained)
        assert not row.ce_weights.any()


def test_an_algorithm_can_weigh_every_token_and_know_the_step():
    (even,), (odd,) = (weighted_rows([REWARDED], own("SummariesOnly"), step) for step in (0, 1))
    assert len(even) == 1, "an episode without reward has no signal in even steps"
    assert len(odd) == 3
    assert [row.weights.sum() for row in odd] == [1, 1, 1]
    assert [row.ce_weights.sum() for row in odd] == [row.row.trained.sum() for row in odd]


def test_what_is_not_an_algorithm_is_refused():
    for name, options in (("builtins:object", {}), ("group_mean", {"window": 3})):
        with pytest.raises(UserError, match=name):
            make_algorithm(name, options)


# -- options of group_mean ----------------------------------------------------------------------------------------


def test_division_by_the_standard_deviation_makes_small_differences_large():
    """Advantages of +-1 from any difference, were it a thousandth: why it is not the default."""
    for difference in (1.0, 1e-1, 1e-3):
        rewards = [0.5, 0.5 + difference]
        np.testing.assert_allclose(GroupAdvantage(divide_by_std=True)(rewards), [-1, 1], rtol=3e-3)
        np.testing.assert_allclose(GroupAdvantage()(rewards), [-difference / 2, difference / 2], rtol=1e-3)


def test_the_command_line_names_an_algorithm_and_sets_its_options():
    """Another algorithm does not get the options that group_mean has by default."""

    def parsed(flag):
        argv = ["rl", "--config=tiny:smoke", "--workdir=runs/x", f"--config.rl.algorithm.{flag}"]
        algorithm = run_config(flags.parse(argv)[0]).rl.algorithm
        return make_algorithm(algorithm.name, algorithm.options)

    for option in ("leave_one_out", "divide_by_std"):
        assert parsed(f"options.{option}=True") == GroupAdvantage(**{option: True})
    (rows,) = weighted_rows([REWARDED], parsed(f"name={__name__}:HalfBaseline"))
    assert rows[0].advantages.max() == 0.5


def test_episodes_have_numbers_of_their_own_in_a_step():
    groups = [
        Group([episode(r, conversation(100 * i, summaries=n)) for i, r in enumerate(rewards)], rewards)
        for rewards, n in (([1.0, 0.0], 1), ([0.5, 0.5], 0), ([0.0, 1.0], 0))
    ]
    assert [[row.episode for row in rows] for rows in weighted_rows(groups, GroupAdvantage())] == [
        [0, 0, 1, 1],
        [],
        [4, 5],
    ]
