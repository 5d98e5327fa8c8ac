"""What the Orchestrator decides before and after a rollout. Whole steps are in tests/stages."""

import dataclasses

import pytest

from composer_jax.rl.orchestrator import Orchestrator, OrchestratorConfig, episode_metrics
from composer_jax.rl.rewards import RewardConfig
from composer_jax.tasks.source import TaskSource
from tests.rl.made_up import conversation, episode

CONFIG = OrchestratorConfig(
    groups={"recall": 3, "bugfix": 2},
    group_size=4,
    trigger=(126, 140),
    compacted_families=("recall",),
    uncompacted_share=0.3,
    max_segments=5,
    max_summary_tokens=32,
    tokens_per_episode=64.0,
    batches=((24, 2),),
    reward=RewardConfig(),
    seed=0,
)


def orchestrator(**changes) -> Orchestrator:
    config = dataclasses.replace(CONFIG, **changes)
    return Orchestrator(config, TaskSource(config.seed), None, None, None)


def test_jobs_are_a_function_of_step_and_seed():
    assert orchestrator().jobs(7) == orchestrator().jobs(7)
    assert orchestrator().jobs(7) != orchestrator(seed=1).jobs(7)


def test_a_task_is_used_in_one_group_of_one_step_only():
    groups = [
        tuple(jobs[i : i + 4]) for step in range(20) for jobs in [orchestrator().jobs(step)] for i in range(0, 20, 4)
    ]
    ids = [{job.task.id for job in group} for group in groups]
    assert all(len(names) == 1 for names in ids)
    assert len(set.union(*ids)) == len(groups) == 100
    assert {job.task.split for group in groups for job in group} == {"train"}


def test_a_step_has_the_groups_that_are_asked_for_beside_each_other():
    jobs = orchestrator().jobs(3)
    assert [job.task.family for job in jobs] == ["bugfix"] * 8 + ["recall"] * 12


def test_every_episode_draws_its_own_random_numbers():
    seeds = [job.seed for step in range(20) for job in orchestrator().jobs(step)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_the_trigger_is_drawn_once_per_group_from_its_range():
    triggers = []
    for step in range(40):
        jobs = orchestrator().jobs(step)
        for i in range(0, len(jobs), 4):
            group = jobs[i : i + 4]
            assert len({job.compaction for job in group}) == 1
            if group[0].task.family == "bugfix":
                assert group[0].compaction.trigger is None
            else:
                triggers.append(group[0].compaction.trigger)
    drawn = [t for t in triggers if t is not None]
    assert min(drawn) >= 126 and max(drawn) <= 140 and len(set(drawn)) > 10
    assert 0.2 < triggers.count(None) / len(triggers) < 0.4
    assert {job.compaction.max_summary_tokens for job in jobs if job.compaction.trigger} == {32}


def test_without_an_uncompacted_share_every_group_of_the_family_is_compacted():
    jobs = [job for step in range(10) for job in orchestrator(uncompacted_share=0.0).jobs(step)]
    assert all(job.compaction.trigger for job in jobs if job.task.family == "recall")


def test_what_the_infrastructure_lost_is_left_out_of_its_group_and_never_scored():
    lost = episode(None)
    episodes = [
        *[episode(1.0), lost, episode(0.0), lost],
        *[lost, lost, lost, episode(1.0)],
        *[lost] * 4,
        *[episode(0.0)] * 4,
    ]
    groups = orchestrator().groups(episodes)
    assert [list(g.rewards) for g in groups] == [[1.0, 0.0], [0.0] * 4]
    assert all(e.reward is not None for g in groups for e in g.episodes)
    # The baseline is that of the graded ones: had the lost ones counted as 0, it would be 0.25.
    assert orchestrator().algorithm(groups[0].rewards).tolist() == [0.5, -0.5]


def test_rewards_of_a_group_include_what_length_costs():
    config = RewardConfig(weight=0.5, summary_token=0.0, turn=1.0, q=0.0)
    episodes = [episode(1.0, turns=1), episode(1.0, turns=2), episode(0.0), episode(0.0)]
    (group,) = orchestrator(reward=config).groups(episodes)
    assert list(group.rewards) == pytest.approx([0.5, 0.0, 0.0, 0.0])


def test_metrics_are_means_over_graded_episodes():
    episodes = [
        episode(1.0, conversation(0, turns=1), turns=1),
        episode(0.0, conversation(0, turns=1, summaries=1), turns=3, family="recall", summaries=1),
        episode(None),
    ]
    row = episode_metrics(episodes)
    assert row["reward"] == 0.5 and row["turns"] == 2
    assert row["reward_bugfix"] == 1.0 and row["reward_recall"] == 0.0
    assert row["infrastructure_failures"] == 1 and row["finished"] == 1.0
    assert (row["pass_compacted"], row["summaries"], row["summary_tokens"]) == (0.0, 1.0, 2.0)


def test_metrics_of_a_step_that_lost_everything_are_empty_not_zero():
    row = episode_metrics([episode(None), episode(None)])
    assert row["reward"] is None and row["reward_bugfix"] is None and row["infrastructure_failures"] == 2
