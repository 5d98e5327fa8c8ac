"""Levels of effort: drawn per group, named in the prompt, priced in the reward."""

import asyncio
from collections import Counter

import pytest

from composer_jax.agent.effort import EffortConfig, EffortLevel, draw_effort
from composer_jax.agent.episode_context import EpisodeContext, EpisodeSettings
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import Compaction
from composer_jax.errors import UserError
from composer_jax.evals.suite import Suite
from composer_jax.rl import rollout
from composer_jax.rl.episode_metrics import episode_metrics
from composer_jax.rl.rewards import RewardConfig, reward_parts
from composer_jax.rl.rollout import roll_out
from tests.agent.conftest import task_of
from tests.rl.made_up import episode
from tests.rl.scripted_policy import ScriptedPolicy

LEVELS = {"high": EffortLevel(4000, 0.25), "low": EffortLevel(100, 2.0)}
EFFORT = EffortConfig(LEVELS)


def test_a_level_is_a_function_of_seed_and_task_and_all_are_drawn_equally_often():
    drawn = [draw_effort(EFFORT, 3, f"task-{i}") for i in range(1000)]
    assert drawn == [draw_effort(EFFORT, 3, f"task-{i}") for i in range(1000)]
    assert drawn != [draw_effort(EFFORT, 4, f"task-{i}") for i in range(1000)]
    assert 430 < Counter(drawn)["low"] < 570 and set(drawn) == set(LEVELS)
    reordered = EffortConfig(dict(reversed(LEVELS.items())))
    assert drawn == [draw_effort(reordered, 3, f"task-{i}") for i in range(1000)]
    assert draw_effort(EffortConfig(), 3, "task-0") == ""
    assert EFFORT.system_prompt("low", "") == "Effort: low. Think for at most 100 tokens before a message."


@pytest.mark.parametrize("level", ["", "low"])
def test_an_episode_that_is_lost_records_its_level(monkeypatch, level):
    async def fake(spec, session, context):
        raise ZeroDivisionError

    monkeypatch.setattr(rollout, "run_episode", fake)
    spec = EpisodeSpec(task_of({}), 0, Compaction(), effort=level)
    context = EpisodeContext(None, None, EpisodeSettings(effort=EFFORT))
    [lost] = asyncio.run(roll_out([spec], ScriptedPolicy(lambda seed: [], slots=1), context))
    assert (lost.outcome, lost.effort) == ("infrastructure", level)


def test_the_level_scales_the_price_of_length():
    config = RewardConfig(weight=0.1, summary_token=0.0, turn=1.0, q=0.0, effort=EFFORT)
    parts = reward_parts([episode(1.0, turns=3, effort=level) for level in ("", *LEVELS)], config)
    costs = {level: part.length_cost for level, part in zip(("", *LEVELS), parts, strict=True)}
    assert costs == pytest.approx({"": 0.3, "high": 0.075, "low": 0.6})
    with pytest.raises(UserError, match="'max' is not a level .* high, low"):
        reward_parts([episode(1.0, effort="max")], config)


def test_metrics_are_by_level():
    episodes = [episode(1.0, effort="low"), episode(0.0, effort="low"), episode(1.0, effort="high"), episode(1.0)]
    row = episode_metrics([episodes], RewardConfig(effort=EFFORT))
    assert (row["grade_effort_low"], row["grade_effort_high"]) == (0.5, 1.0)
    assert row["tokens_effort_low"] == episodes[0].transcript.total_sampled
    assert not any("effort" in name for name in episode_metrics([[episode(1.0)]], RewardConfig()))


def test_an_evaluation_has_one_level():
    specs = Suite("a", [task_of({})], 2, Compaction(), effort="high").specs()
    assert [spec.effort for spec in specs] == ["high", "high"]
