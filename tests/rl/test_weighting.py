"""The rules that hold for every algorithm."""

import pytest

from composer_jax.errors import UserError
from composer_jax.rl.algorithm import GroupAdvantage
from composer_jax.rl.batch import Group
from composer_jax.rl.config import AlgorithmConfig
from composer_jax.rl.toggle import ToggleConfig, toggle_rewards
from composer_jax.rl.weighting import OVERLONG, weighted_rows
from tests.rl.made_up import conversation, episode


def rows(group: Group, step: int = 0, **config):
    (chosen,) = weighted_rows([group], GroupAdvantage(), step, AlgorithmConfig(**config))
    return chosen


def group(*grades: float, turns=(2, 2, 2, 2), summaries: int = 0) -> Group:
    episodes = [
        episode(grade, conversation(100 * i, turns=n, summaries=summaries))
        for i, (grade, n) in enumerate(zip(grades, turns, strict=False))
    ]
    return Group(episodes, list(grades))


@pytest.mark.parametrize("outcome", [*OVERLONG, "finished", "no_call"])
def test_an_overlong_episode_is_left_out_of_the_loss_and_not_of_the_baseline(outcome):
    graded = group(1.0, 0.0, 0.0)
    graded.episodes[1].outcome = outcome
    values = [float(row.advantages.sum() / row.row.trained.sum()) for row in rows(graded, mask_overlong=True)]
    assert values == pytest.approx([2 / 3, -1 / 3] if outcome in OVERLONG else [2 / 3, -1 / 3, -1 / 3])
    assert len(rows(graded)) == 3


def test_episodes_have_numbers_of_their_own():
    by_group = weighted_rows([group(1.0, 0.0, summaries=1), group(0.5, 0.5), group(0.0, 1.0)], GroupAdvantage())
    assert [[row.episode for row in chosen] for chosen in by_group] == [[0, 0, 1, 1], [], [4, 5]]


# -- Toggle -------------------------------------------------------------------------------------------------------

TOGGLE = ToggleConfig(every=3, threshold=0.6, quantile=0.5)
EASY = group(1.0, 1.0, 1.0, 0.0, turns=(1, 2, 3, 1))
"""Lengths 3, 6, 9 and 3; the budget is 6."""


def test_phases_alternate_and_the_first_has_a_budget():
    assert [TOGGLE.has_budget(step) for step in range(10)] == [True] * 3 + [False] * 3 + [True] * 3 + [False]
    assert not ToggleConfig().has_budget(0)


def test_only_short_solutions_of_easy_tasks_are_rewarded_in_a_phase_with_a_budget():
    assert list(toggle_rewards(EASY, TOGGLE, 0).rewards) == [1.0, 1.0, 0.0, 0.0]
    assert list(toggle_rewards(EASY, TOGGLE, 3).rewards) == [1.0, 1.0, 1.0, 0.0]
    hard = group(1.0, 0.0, 0.0, 1.0, turns=(3, 1, 1, 1))
    assert list(toggle_rewards(hard, TOGGLE, 0).rewards) == [1.0, 0.0, 0.0, 1.0], "half of the episodes solve it"
    assert list(toggle_rewards(group(0.9, 0.9), TOGGLE, 0).rewards) == [0.9, 0.9], "nobody solved it"


def test_the_budget_is_a_quantile_of_the_lengths_of_solved_episodes():
    for quantile, rewards in ((0.0, [1, 0, 0, 0]), (0.5, [1, 1, 0, 0]), (1.0, [1, 1, 1, 0])):
        assert list(toggle_rewards(EASY, ToggleConfig(1, 0.6, quantile), 0).rewards) == rewards


def test_the_step_decides_the_phase():
    budget, free = (rows(EASY, step, toggle=TOGGLE) for step in (2, 3))
    assert [row.advantages.max() > 0 for row in budget] == [True, True, False, False]
    assert [row.advantages.max() > 0 for row in free] == [True, True, True, False]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ToggleConfig(every=-1), "toggle.every=-1 is negative"),
        (lambda: ToggleConfig(threshold=1.5), "toggle.threshold=1.5 is out of range"),
        (lambda: ToggleConfig(quantile=-0.1), "toggle.quantile=-0.1 is out of range"),
    ],
)
def test_a_value_out_of_range_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()
