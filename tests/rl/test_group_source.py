"""Which task, compaction and seeds a group has."""

import dataclasses
from collections import Counter

import pytest

from composer_jax.agent.config import AgentConfig
from composer_jax.agent.summary import Compaction
from composer_jax.rl.config import RLConfig
from composer_jax.rl.curriculum import CurriculumConfig, family_results, family_weights
from composer_jax.rl.group_source import GroupSource
from composer_jax.tasks.config import TasksConfig
from composer_jax.tasks.source import TaskSource
from tests.rl.made_up import episode

CONFIG = RLConfig(
    groups={"memory_chain": 3, "bugfix": 2},
    group_size=4,
    trigger=(126, 140),
    family_compactions={"bugfix": "none", "repository": "late"},
    uncompacted_fraction=0.3,
    batches=((24, 2),),
)
AGENT = AgentConfig(
    compactions={
        "none": Compaction(None),
        "summary": Compaction(132, max_summary_tokens=32),
        "late": Compaction(400),
    }
)
TASKS = TasksConfig(
    families={
        "bugfix": "composer_jax.demo.bugfix:Bugfix",
        "memory_chain": "composer_jax.demo.memory_chain:MemoryChain",
    }
)


def source(seed: int = 0, **changes) -> GroupSource:
    drawn = GroupSource(dataclasses.replace(CONFIG, **changes), AGENT, seed, TaskSource(seed, TASKS))
    for number in range(200):
        drawn.draw(number, [])
    return drawn


def test_a_group_is_a_function_of_its_number_and_the_seed():
    drawn = source()
    assert drawn.specs(7) == source().specs(7) != source(seed=1).specs(7)
    groups = [drawn.specs(number) for number in range(100)]
    families = [group[0].task.family for group in groups]
    assert families == (["bugfix"] * 2 + ["memory_chain"] * 3) * 20, "in each step"
    ids = [{spec.task.id for spec in group} for group in groups]
    assert all(len(names) == 1 for names in ids) and len(set.union(*ids)) == 100
    assert {spec.task.split for group in groups for spec in group} == {"train"}
    assert all(len(group) == 4 and {spec.group for spec in group} == {n} for n, group in enumerate(groups))
    seeds = {spec.seed for group in groups for spec in group}
    assert len(seeds) == 400 and all(0 <= seed < 2**32 for seed in seeds)


def test_the_trigger_is_drawn_once_per_group_from_its_range():
    triggers, drawn_groups = [], source()
    for number in range(200):
        group = drawn_groups.specs(number)
        assert len({spec.compaction for spec in group}) == 1
        if group[0].task.family == "bugfix":
            assert group[0].compaction.trigger is None
        else:
            triggers.append(group[0].compaction.trigger)
            assert group[0].compaction.trigger is None or group[0].compaction.max_summary_tokens == 32
    drawn = [t for t in triggers if t is not None]
    assert min(drawn) >= 126 and max(drawn) <= 140 and len(set(drawn)) > 10
    assert 0.2 < triggers.count(None) / len(triggers) < 0.4
    compacted = source(uncompacted_fraction=0.0)
    specs = [spec for number in range(50) for spec in compacted.specs(number)]
    assert all(spec.compaction.trigger for spec in specs if spec.task.family == "memory_chain")
    task = dataclasses.replace(compacted.task(0), family="repository")
    assert compacted.draw_compaction(task) == Compaction(400), "that of the family"


def result(spread, turns=3.0, thinking=0.0):
    return {"groups": 1, "spread": spread, "turns": turns, "thinking": thinking}


def test_a_family_in_which_all_episodes_agree_is_drawn_less_often():
    config = CurriculumConfig(window=4)
    curriculum = GroupSource(dataclasses.replace(CONFIG, curriculum=config), AGENT, 0, TaskSource(0, TASKS))
    results = [{"bugfix": result(0.0), "memory_chain": result(0.25)}] * 4
    families = Counter(curriculum.draw(number, results)[0] for number in range(400))
    expected = 2 * 0.1 / (2 * 0.1 + 3 * 1.1)
    assert abs(families["bugfix"] / 400 - expected) < 3 * (expected * (1 - expected) / 400) ** 0.5
    ids = [curriculum.task(number).id for number in range(400)]
    assert len(set(ids)) == 400
    again = GroupSource(dataclasses.replace(CONFIG, curriculum=config), AGENT, 0, TaskSource(0, TASKS))
    assert [again.draw(number, results) for number in range(400)] == list(curriculum.places.values())


def test_weights_of_families():
    groups = {"a": 2, "b": 1, "c": 0}
    config = CurriculumConfig(window=2, floor=0.1, turns=1.0)
    assert family_weights(groups, [], config) == {"a": 2.2, "b": 1.1}
    old = {"a": result(0.25), "b": result(0.25)}
    new = [{"a": result(0.0, turns=2.0)}, {"a": result(0.16, turns=4.0), "b": result(0.0, turns=9.0)}]
    assert family_weights(groups, [old, *new], config) == pytest.approx(
        {"a": 2 * (0.1 + 0.32) * 3 / 6, "b": 0.1 * 9 / 6}  # window of two: `old` is forgotten
    )


def test_results_of_families_are_variances_of_pass_rates():
    groups = [
        [episode(1.0, turns=2), episode(0.0, turns=4), episode(None)],
        [episode(1.0, turns=6)] * 4,
        [episode(0.0, family="memory_chain")] * 2,
        [episode(None, family="lost")],
    ]
    assert family_results(groups) == {
        "bugfix": {"groups": 2, "spread": 0.25, "turns": 9.0, "thinking": 0.0, "grade": 1.5},
        "memory_chain": {"groups": 1, "spread": 0.0, "turns": 2.0, "thinking": 0.0, "grade": 0.0},
    }
