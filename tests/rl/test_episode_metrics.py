"""The metrics of a step's episodes."""

import pytest

from composer_jax.agent.usage import EpisodeUsage
from composer_jax.rl.episode_metrics import episode_metrics
from composer_jax.rl.rewards import RewardConfig
from composer_jax.tasks.grading.hack_monitor import FLAG_NAMES
from tests.rl.made_up import conversation, episode


def test_metrics_are_means_over_graded_episodes():
    episodes = [
        episode(1.0, conversation(0, turns=1), turns=1),
        episode(0.0, conversation(0, turns=1, summaries=1), turns=3, family="memory_chain", summaries=1),
        episode(None),
    ]
    row = episode_metrics([episodes], RewardConfig())
    assert row["reward"] == 0.5 and row["turns"] == 2
    assert row["reward_bugfix"] == 1.0 and row["reward_memory_chain"] == 0.0
    assert row["infrastructure_failures"] == 1 and row["finished"] == 1.0
    broken = [episode(0.0, outcome=outcome) for outcome in ("out_of_time", "killed_sandbox", "killed_sandbox")]
    counts = episode_metrics([[*broken, episode(None)]], RewardConfig())
    assert (counts["out_of_time"], counts["killed_sandbox"], counts["infrastructure_failures"]) == (1, 2, 1)
    assert (row["pass_compacted"], row["summaries"], row["summary_tokens"]) == (0.0, 1.0, 2.0)
    lost = episode_metrics([[episode(None), episode(None)]], RewardConfig())
    assert lost["reward"] is None and lost["reward_bugfix"] is None and lost["infrastructure_failures"] == 2


def test_summaries_that_failed_and_facts_that_they_kept():
    episodes = [
        episode(1.0, summaries=2, failed_summaries=1, facts_kept=1.0, facts_kept_last=0.0),
        episode(0.0, summaries=1, facts_kept=0.0, facts_kept_last=0.0),
        episode(1.0, summaries=1),
        episode(1.0),
        episode(None, summaries=1, failed_summaries=1, facts_kept=0.0),
    ]
    row = episode_metrics([episodes], RewardConfig())
    assert (row["failed_summaries"], row["facts_kept"]) == (pytest.approx(1 / 3), 0.5)
    assert row["facts_kept_last"] == 0.0
    row = episode_metrics([episodes[3:]], RewardConfig())
    assert row["facts_kept"] is row["facts_kept_last"] is None


def test_metrics_tell_the_objective_from_the_grade():
    config = RewardConfig(weight=0.5, summary_token=0.0, turn=1.0, q=0.0)
    episodes = [episode(1.0, turns=1), episode(1.0, turns=1, flags=["reads_caches: a.pyc"]), episode(0.0)]
    row = episode_metrics([episodes], config)
    assert (row["grade"], row["grade_bugfix"]) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert (row["reward"], row["reward_bugfix"]) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert (row["length_cost"], row["costs_bounded"]) == (pytest.approx(1 / 3), 0)


def test_costs_are_bounded_in_the_group_of_their_episode_and_counted():
    """A turn costs 0.5. Alone, the grade 0.9 bears it; in a group with a grade of 0.8 it does not."""
    config = RewardConfig(weight=0.5, summary_token=0.0, turn=1.0, q=0.0)
    one, other = episode(1.0, turns=1), episode(0.8, turns=1)
    apart, together = episode_metrics([[one], [other]], config), episode_metrics([[one, other]], config)
    assert (apart["costs_bounded"], together["costs_bounded"]) == (0.5, 1.0)
    assert apart["length_cost"] == together["length_cost"] == pytest.approx(0.5)
    assert together["reward"] > apart["reward"]


def test_flags_are_counted_by_name_and_change_no_reward():
    """An episode counts once for each name."""
    flags = ["exits: a.py: exit()", "exits: b.py: exit()", "reads_history: shell: git log"]
    episodes = [episode(1.0, flags=flags), episode(0.0, flags=flags[:1]), episode(1.0), episode(None, flags=flags)]
    row = episode_metrics([episodes], RewardConfig())
    assert (row["flagged"], row["flag_exits"], row["flag_reads_history"]) == (2, 2, 1)
    assert {name for name in row if name.startswith("flag_")} == {f"flag_{name}" for name in FLAG_NAMES}
    assert sum(row[f"flag_{name}"] for name in FLAG_NAMES) == 3


def test_lengths_are_means_over_graded_episodes():
    usage = EpisodeUsage(
        thinking_tokens=3, call_tokens=4, output_tokens=5, final_tokens=6, calls={"shell": 2, "read": 1}
    )
    row = episode_metrics([[episode(1.0, usage=usage), episode(0.0), episode(None, usage=usage)]], RewardConfig())
    assert [row[f"{name}_tokens"] for name in ("thinking", "call", "output", "final")] == [1.5, 2.0, 2.5, 3.0]
    assert (row["calls"], row["shell_calls"]) == (1.5, 1.0)
