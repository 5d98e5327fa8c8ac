"""What behaviour costs."""

import pytest

from composer_jax.agent.usage import EpisodeUsage
from composer_jax.errors import UserError
from composer_jax.rl.episode_metrics import episode_metrics
from composer_jax.rl.penalties import BEHAVIORS, PenaltyConfig, behaviors, penalties
from composer_jax.rl.rewards import RewardConfig, reward_parts
from tests.rl.made_up import episode

BAD = EpisodeUsage(
    calls={"shell": 4, "read_file": 2},
    malformed_calls=2,
    shell_duplicates=1,
    todos=5,
    unfinished_todos=3,
    added_lines=10,
    comment_lines=8,
    asked_question=True,
)
PRICES = PenaltyConfig(0.1, 0.2, 0.3, 0.4, 0.6, 0.5)
WANT = {
    "malformed_calls": 2 / 8,
    "shell_duplicates": 1 / 4,
    "unfinished_todos": 3 / 5,
    "comment_reasoning": (0.8 - 0.6) / 0.4,
    "question_instead_of_edit": 1.0,
}


def test_every_behaviour_has_its_measure_and_its_price():
    assert behaviors(episode(1.0, usage=BAD), PRICES) == pytest.approx(WANT)
    prices = dict(zip(BEHAVIORS, (0.1, 0.2, 0.3, 0.4, 0.5), strict=True))
    assert penalties(episode(1.0, usage=BAD), PRICES) == pytest.approx({k: prices[k] * WANT[k] for k in WANT})
    assert set(WANT) == set(BEHAVIORS)


@pytest.mark.parametrize("behavior", BEHAVIORS)
@pytest.mark.parametrize(("grade", "flags"), [(1.0, []), (0.0, []), (1.0, ["exits: a.py: exit()"])])
def test_a_price_is_paid_by_solved_failed_and_zeroed_episodes(behavior, grade, flags):
    config = RewardConfig(penalties=PenaltyConfig(**{behavior: 0.5, "comment_limit": 0.6}), zeroed=("exits",))
    parts = reward_parts(episode(grade, usage=BAD, flags=flags), config)
    earned = 0.0 if flags else grade
    assert parts.reward == pytest.approx(earned - 0.5 * WANT[behavior]) and parts.penalty > 0
    assert {name for name, cost in parts.penalties.items() if cost} == {behavior}


def test_behaviour_costs_nothing_by_default_and_nothing_done_is_no_behaviour():
    assert reward_parts(episode(1.0, usage=BAD), RewardConfig()).reward == 1.0
    assert set(behaviors(episode(1.0), PRICES).values()) == {0.0}


def test_comments_below_the_limit_and_questions_beside_an_edit_are_free():
    usage = EpisodeUsage(added_lines=10, comment_lines=6, asked_question=True, changed_files=1)
    assert set(behaviors(episode(1.0, usage=usage), PRICES).values()) == {0.0}


def test_metrics_show_behaviour_always_and_its_price_where_it_has_one():
    config = RewardConfig(penalties=PenaltyConfig(malformed_calls=0.4))
    row = episode_metrics([episode(1.0, usage=BAD), episode(1.0), episode(None, usage=BAD)], config)
    assert {name: row[f"behavior_{name}"] for name in WANT if name != "comment_reasoning"} == pytest.approx(
        {name: value / 2 for name, value in WANT.items() if name != "comment_reasoning"}
    )
    assert row["penalty_malformed_calls"] == row["penalty"] == pytest.approx(0.4 * 0.25 / 2)
    assert row["reward"] == pytest.approx(1 - row["penalty"])
    assert "penalty_unfinished_todos" not in row


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"malformed_calls": -0.1}, "rl.reward.penalties.malformed_calls=-0.1 is negative"),
        ({"comment_limit": 1.0}, "rl.reward.penalties.comment_limit=1.0 is no fraction below 1"),
    ],
)
def test_impossible_prices_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        PenaltyConfig(**values)
