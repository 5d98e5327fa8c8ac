"""Groups -> rows to train."""

from composer_jax.rl.algorithm import GroupAdvantage
from composer_jax.rl.batch import Group
from composer_jax.rl.policy_update import weighted_rows
from tests.rl.made_up import conversation, episode


def group(*grades: float, turns=(2, 2, 2, 2), summaries: int = 0) -> Group:
    episodes = [
        episode(grade, conversation(100 * i, turns=n, summaries=summaries))
        for i, (grade, n) in enumerate(zip(grades, turns, strict=False))
    ]
    return Group(episodes, list(grades))


def test_episodes_have_numbers_of_their_own():
    by_group = weighted_rows([group(1.0, 0.0, summaries=1), group(0.5, 0.5), group(0.0, 1.0)], GroupAdvantage())
    assert [[row.episode for row in chosen] for chosen in by_group] == [[0, 0, 1, 1], [], [4, 5]]
