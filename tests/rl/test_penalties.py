"""What behaviour costs."""

import dataclasses

import pytest

from composer_jax.agent.usage import EpisodeUsage
from composer_jax.errors import UserError
from composer_jax.rl.episode_metrics import episode_metrics
from composer_jax.rl.penalties import BEHAVIORS, behaviors
from composer_jax.rl.rewards import RewardConfig, reward_parts
from tests.rl.made_up import episode
from tests.rl.test_policy_update import CONFIG, update

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
WANT = {
    "malformed_calls": 2 / 8,
    "shell_duplicates": 1 / 4,
    "unfinished_todos": 3 / 5,
    "comment_reasoning": (0.8 - 0.5) / 0.5,
    "question_instead_of_edit": 1.0,
}


def parts_of(one, **penalties):
    """The parts of the only episode of a group."""
    (parts,) = reward_parts([one], RewardConfig(penalties=penalties))
    return parts


def test_every_behaviour_has_its_measure_and_its_price():
    assert behaviors(episode(1.0, usage=BAD), {}) == pytest.approx(WANT)
    prices = dict(zip(BEHAVIORS, (0.01, 0.02, 0.03, 0.04, 0.05), strict=True))
    parts = parts_of(episode(1.0, usage=BAD), **prices)
    assert parts.penalties == pytest.approx({name: prices[name] * WANT[name] for name in WANT})
    assert parts.reward == pytest.approx(1 - sum(prices[name] * WANT[name] for name in WANT))
    assert set(WANT) == set(BEHAVIORS)
    failed = parts_of(episode(0.0, usage=BAD), **prices)
    assert failed.penalties == parts.penalties and failed.reward == pytest.approx(-sum(parts.penalties.values()))


def test_what_is_free():
    (parts,) = reward_parts([episode(1.0, usage=BAD)], RewardConfig())
    assert parts.reward == 1.0, "nothing has a price by default"
    comments_and_edit = EpisodeUsage(added_lines=10, comment_lines=5, asked_question=True, changed_files=1)
    for usage in (EpisodeUsage(), comments_and_edit):
        assert set(behaviors(episode(1.0, usage=usage), {}).values()) == {0.0}


def long_detail(episode):
    """A behaviour of a user's own."""
    return min(1.0, len(episode.detail) / 10)


def out_of_range(episode):
    return 2


OWN = {"long_detail": "tests.rl.test_penalties:long_detail"}


def test_a_behaviour_of_a_users_own_is_measured_logged_and_priced_like_ours():
    config = RewardConfig(behaviors=OWN, penalties={"long_detail": 0.2, "malformed_calls": 0.1})
    wordy = episode(1.0, usage=BAD, detail="12345")
    (parts,) = reward_parts([wordy], config)
    assert parts.penalties == pytest.approx({"long_detail": 0.1, "malformed_calls": 0.025})
    row = episode_metrics([[wordy, episode(1.0)]], config)
    assert row["behavior_long_detail"] == 0.25 and row["penalty_long_detail"] == pytest.approx(0.05)
    assert row["behavior_shell_duplicates"] == 0.125
    free = episode_metrics([[wordy]], RewardConfig(behaviors=OWN))
    assert free["behavior_long_detail"] == 0.5 and "penalty_long_detail" not in free


def test_a_behaviour_out_of_range_or_without_its_module_is_named():
    config = RewardConfig(behaviors={"own": "tests.rl.test_penalties:out_of_range"}, penalties={"own": 0.1})
    with pytest.raises(UserError, match="own .* returned 2.0"):
        reward_parts([episode(1.0)], config)
    config = dataclasses.replace(CONFIG, reward=RewardConfig(behaviors={"own": "no_module:f"}))
    with pytest.raises(UserError, match="'no_module:f' cannot"):
        update(config)


def test_metrics_show_behaviour_always_and_its_price_where_it_has_one():
    config = RewardConfig(penalties={"malformed_calls": 0.4})
    row = episode_metrics([[episode(1.0, usage=BAD), episode(1.0)], [episode(None, usage=BAD)]], config)
    assert {name: row[f"behavior_{name}"] for name in WANT if name != "comment_reasoning"} == pytest.approx(
        {name: value / 2 for name, value in WANT.items() if name != "comment_reasoning"}
    )
    assert row["penalty_malformed_calls"] == row["penalty"] == pytest.approx(0.4 * 0.25 / 2)
    assert row["reward"] == pytest.approx(1 - row["penalty"])
    assert "penalty_unfinished_todos" not in row
