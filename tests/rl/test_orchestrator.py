"""What the Orchestrator decides before and after a rollout. Whole steps are in tests/stages."""

import dataclasses

import pytest

from composer_jax.agent.config import AgentConfig
from composer_jax.agent.summary import Compaction
from composer_jax.models.model_def import ModelDef
from composer_jax.rl.config import RLConfig
from composer_jax.rl.orchestrator import Cursor, Orchestrator, episode_metrics, learning_metrics
from composer_jax.rl.rewards import RewardConfig
from composer_jax.rl.rollout import EpisodeSpec, Rollout
from composer_jax.tasks.config import TasksConfig
from composer_jax.tasks.source import TaskSource
from composer_jax.train.learner import TrainState
from tests.models.small import small
from tests.rl.made_up import conversation, episode

CONFIG = RLConfig(
    groups={"recall": 3, "bugfix": 2},
    group_size=4,
    trigger=(126, 140),
    family_compactions={"bugfix": "none", "repository": "late"},
    uncompacted_fraction=0.3,
    tokens_per_episode=64.0,
    batches=((24, 2),),
)
AGENT = AgentConfig(
    compactions={
        "none": Compaction(None),
        "summary": Compaction(132, max_summary_tokens=32),
        "late": Compaction(400),
    }
)
TASKS = TasksConfig(families={"bugfix": "composer_jax.demo.bugfix:Bugfix", "recall": "composer_jax.demo.recall:Recall"})


def orchestrator(seed: int = 0, **changes) -> Orchestrator:
    config = dataclasses.replace(CONFIG, **changes)
    return Orchestrator(config, AGENT, seed, TaskSource(seed, TASKS), None, None, None)


def rollout(episodes) -> Rollout:
    """Episodes in groups of four."""
    specs = [EpisodeSpec(None, i, Compaction(None), group=i // 4) for i in range(len(episodes))]
    return Rollout(specs, episodes, 1.0, 0.5, 1, 0)


def test_specs_are_a_function_of_step_and_seed():
    assert orchestrator().specs(7) == orchestrator().specs(7)
    assert orchestrator().specs(7) != orchestrator(seed=1).specs(7)


def test_a_task_is_used_in_one_group_of_one_step_only():
    groups = [
        tuple(specs[i : i + 4]) for step in range(20) for specs in [orchestrator().specs(step)] for i in range(0, 20, 4)
    ]
    ids = [{spec.task.id for spec in group} for group in groups]
    assert all(len(names) == 1 for names in ids)
    assert len(set.union(*ids)) == len(groups) == 100
    assert {spec.task.split for group in groups for spec in group} == {"train"}


def test_a_step_has_the_groups_that_are_asked_for_beside_each_other():
    specs = orchestrator().specs(3)
    assert [spec.task.family for spec in specs] == ["bugfix"] * 8 + ["recall"] * 12


def test_every_episode_draws_its_own_random_numbers():
    seeds = [spec.seed for step in range(20) for spec in orchestrator().specs(step)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_the_trigger_is_drawn_once_per_group_from_its_range():
    triggers = []
    for step in range(40):
        specs = orchestrator().specs(step)
        for i in range(0, len(specs), 4):
            group = specs[i : i + 4]
            assert len({spec.compaction for spec in group}) == 1
            if group[0].task.family == "bugfix":
                assert group[0].compaction.trigger is None
            else:
                triggers.append(group[0].compaction.trigger)
    drawn = [t for t in triggers if t is not None]
    assert min(drawn) >= 126 and max(drawn) <= 140 and len(set(drawn)) > 10
    assert 0.2 < triggers.count(None) / len(triggers) < 0.4
    assert {spec.compaction.max_summary_tokens for spec in specs if spec.compaction.trigger} == {32}


def test_without_an_uncompacted_fraction_every_group_of_the_family_is_compacted():
    specs = [spec for step in range(10) for spec in orchestrator(uncompacted_fraction=0.0).specs(step)]
    assert all(spec.compaction.trigger for spec in specs if spec.task.family == "recall")


def test_what_the_infrastructure_lost_is_left_out_of_its_group_and_never_scored():
    lost = episode(None)
    episodes = [
        *[episode(1.0), lost, episode(0.0), lost],
        *[lost, lost, lost, episode(1.0)],
        *[lost] * 4,
        *[episode(0.0)] * 4,
    ]
    groups = orchestrator().groups(rollout(episodes))
    assert [list(g.rewards) for g in groups] == [[1.0, 0.0], [0.0] * 4]
    assert all(e.reward is not None for g in groups for e in g.episodes)
    # The baseline is that of the graded ones: had the lost ones counted as 0, it would be 0.25.
    assert orchestrator().algorithm(groups[0].rewards).tolist() == [0.5, -0.5]


def test_rewards_of_a_group_include_what_length_costs():
    config = RewardConfig(weight=0.5, summary_token=0.0, turn=1.0, q=0.0)
    episodes = [episode(1.0, turns=1), episode(1.0, turns=2), episode(0.0), episode(0.0)]
    (group,) = orchestrator(reward=config).groups(rollout(episodes))
    assert list(group.rewards) == pytest.approx([0.5, 0.0, 0.0, 0.0])


def test_metrics_are_means_over_graded_episodes():
    episodes = [
        episode(1.0, conversation(0, turns=1), turns=1),
        episode(0.0, conversation(0, turns=1, summaries=1), turns=3, family="recall", summaries=1),
        episode(None),
    ]
    row = episode_metrics(episodes, RewardConfig())
    assert row["reward"] == 0.5 and row["turns"] == 2
    assert row["reward_bugfix"] == 1.0 and row["reward_recall"] == 0.0
    assert row["infrastructure_failures"] == 1 and row["finished"] == 1.0
    assert (row["pass_compacted"], row["summaries"], row["summary_tokens"]) == (0.0, 1.0, 2.0)


def test_metrics_of_a_step_that_lost_everything_are_empty_not_zero():
    row = episode_metrics([episode(None), episode(None)], RewardConfig())
    assert row["reward"] is None and row["reward_bugfix"] is None and row["infrastructure_failures"] == 2


def test_metrics_tell_the_objective_from_the_grade():
    config = RewardConfig(weight=0.5, summary_token=0.0, turn=1.0, q=0.0, zeroed=("reads_caches",))
    episodes = [episode(1.0, turns=1), episode(1.0, turns=1, flags=["reads_caches: a.pyc"]), episode(0.0)]
    row = episode_metrics(episodes, config)
    assert (row["grade"], row["grade_bugfix"]) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert (row["reward"], row["reward_bugfix"]) == (pytest.approx(0.5 / 3), pytest.approx(0.5 / 3))
    assert (row["length_cost"], row["zeroed"]) == (pytest.approx(1 / 3), 1)


class NeverStepped:
    definition = ModelDef(small())

    def step(self, *_):
        raise AssertionError("a step without useful groups updates nothing")


def test_a_step_without_useful_groups_changes_no_weight_and_uses_up_its_tasks():
    player = Orchestrator(CONFIG, AGENT, 0, TaskSource(0, TASKS), NeverStepped(), None, None)
    state = TrainState({}, {}, {}, 7)
    after, cursor, row = player.learn(state, Cursor(8, 5, 7), rollout([episode(0.0)] * 4 + [episode(1.0)] * 4))
    assert after is state and cursor == Cursor(task_step=9, weight_version=5, optimizer_step=7)
    assert row["groups_used"] == 0 and row["trained_tokens"] == 0 and row["grad_norm"] is None
    assert row["grade"] == 0.5


def test_a_family_can_have_a_compaction_of_its_own():
    task = dataclasses.replace(orchestrator().specs(0)[0].task, family="repository")
    assert orchestrator().draw_compaction(task) == Compaction(400)


@pytest.mark.parametrize("has_experts", [True, False])
def test_only_a_network_with_experts_has_metrics_of_their_load(has_experts):
    learned = dict.fromkeys(
        ("tokens", "entropy", "out_of_region", "k1", "log_ratio", "grad_norm", "learning_rate"), 0.5
    )
    learned |= {"load_imbalance": 1.5} if has_experts else {}
    updated, without_update = (learning_metrics(row, has_experts=has_experts) for row in (learned, None))
    assert updated.keys() == without_update.keys()
    assert updated.get("load_imbalance") == (1.5 if has_experts else None)
    assert ("load_imbalance" in updated) is has_experts
