"""Ladders: which rung RL is on after the results of its steps, and which groups it draws from there."""

import dataclasses
import random
from collections import Counter

import pytest

from composer_jax.agent.config import AgentConfig
from composer_jax.agent.summary import Compaction
from composer_jax.errors import UserError
from composer_jax.rl.config import RLConfig
from composer_jax.rl.curriculum import CurriculumConfig, current_rung, family_results, family_weights, rung_metrics
from composer_jax.rl.group_source import GroupSource
from composer_jax.tasks.config import TasksConfig
from composer_jax.tasks.source import TaskSource
from tests.rl import simulated
from tests.rl.made_up import episode
from tests.rl.simulated import Simulation, drawn_play
from tests.virtual_clock import run_virtually

LADDERS = {"one_bug": ("two_bugs", "three_bugs")}
CURRICULUM = CurriculumConfig(ladders=LADDERS, rung_window=2)
GROUPS = {"one_bug": 3, "two_bugs": 0, "bugfix": 1}
CONFIG = RLConfig(groups=GROUPS, group_size=4, curriculum=CURRICULUM, batches=((24, 2),))
AGENT = AgentConfig(compactions={"none": Compaction(None), "summary": Compaction(132), "late": Compaction(400)})
FAMILIES = {
    "bugfix": "composer_jax.demo.bugfix:Bugfix",
    "one_bug": "composer_jax.demo.notes:OneBug",
    "two_bugs": "composer_jax.demo.notes:TwoBugs",
    "three_bugs": "composer_jax.demo.notes:ThreeBugs",
}
TASKS = TasksConfig(families=FAMILIES)


def source(config: RLConfig = CONFIG, seed: int = 0, tasks: TaskSource | None = None) -> GroupSource:
    return GroupSource(config, AGENT, seed, tasks or TaskSource(seed, TASKS))


def with_curriculum(**changes) -> RLConfig:
    return dataclasses.replace(CONFIG, curriculum=dataclasses.replace(CURRICULUM, **changes))


def step(groups: int = 1, **grades: float) -> dict:
    """Results of a step in which every family had so many groups of this mean grade."""
    return {
        family: {"groups": groups, "spread": 0.0, "turns": 0.0, "thinking": 0.0, "grade": groups * grade}
        for family, grade in grades.items()
    }


def rungs(*results: dict, **changes) -> list[int]:
    """The rung before the first step and after each one."""
    config = dataclasses.replace(CURRICULUM, **changes)
    return [current_rung("one_bug", results[:steps], config) for steps in range(len(results) + 1)]


# -- the rung --------------------------------------------------------------------------------------------------------

UP = [step(one_bug=1.0)] * 2
TOP = [*UP, *[step(two_bugs=1.0)] * 2]
EVERY = step(one_bug=1.0, two_bugs=1.0, three_bugs=1.0)


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([step(one_bug=0.75), step(one_bug=0.85)], [0, 0, 1]),  # from a mean of 0.8 on
        ([step(one_bug=0.75), step(one_bug=0.84)], [0, 0, 0]),
        ([step(one_bug=0.5), step(groups=9, one_bug=0.9)], [0, 0, 1]),  # of groups: of steps it would be 0.7
        ([step(one_bug=0.1), step(one_bug=0.8), step(one_bug=0.8)], [0, 0, 0, 1]),  # of the last two steps
        ([step(one_bug=1.0), {}, step(bugfix=1.0), step(one_bug=1.0)], [0, 0, 0, 0, 1]),  # that have the family
        ([*UP, step(one_bug=0.0), step(one_bug=0.0, two_bugs=0.5)], [0, 0, 1, 1, 1]),  # an easier rung does not count
        ([step(one_bug=1.0, two_bugs=1.0)] * 4, [0, 0, 1, 1, 2]),  # a change of rung forgets what was before
        ([*UP, step(two_bugs=0.0), step(two_bugs=0.3)], [0, 0, 1, 1, 0]),
        ([*UP, step(two_bugs=0.1), step(two_bugs=0.3)], [0, 0, 1, 1, 1]),  # 0.2 is not below 0.2
        ([*[step(one_bug=0.0)] * 4, *UP], [0, 0, 0, 0, 0, 0, 1]),  # no rung is below the first
        ([*[EVERY] * 8, *[step(three_bugs=0.0)] * 2], [0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 1]),  # or above the last
    ],
)
def test_the_mean_grade_of_a_window_of_steps_moves_the_rung(results, expected):
    assert rungs(*results) == expected
    assert rungs(*[EVERY] * 5, rung_window=4) == [0, 0, 0, 0, 1, 1]


def test_the_column_of_a_ladder_counts_from_one():
    assert rung_metrics([step(one_bug=1.0)] * 2, CURRICULUM) == {"rung_one_bug": 2}
    assert rung_metrics([step(one_bug=1.0)] * 2, CurriculumConfig()) == {}


def test_results_that_were_recorded_without_grades_are_refused():
    old = step(one_bug=1.0)
    del old["one_bug"]["grade"]
    assert rungs(step(two_bugs=1.0)) == [0, 0]
    with pytest.raises(UserError, match="the grades of step 2"):
        rungs(step(one_bug=1.0), old)


# -- the groups ------------------------------------------------------------------------------------------------------


def families_of(drawn: GroupSource, count: int, results) -> list[str]:
    return [drawn.draw(number, results)[0] for number in range(count)]


def test_a_ladder_changes_the_family_of_its_groups_and_nothing_else():
    plain = source(RLConfig(groups=GROUPS, group_size=4, batches=((24, 2),)))
    families = families_of(plain, 40, TOP)
    expected = [place for i in range(10) for place in (("bugfix", i), *(("one_bug", 3 * i + j) for j in range(3)))]
    assert list(plain.places.values()) == expected
    assert families_of(source(), 40, []) == families, "the first rung changes nothing"
    families = families_of(source(with_curriculum(easier=0.0)), 12, UP)
    assert families == ["bugfix", "two_bugs", "two_bugs", "two_bugs"] * 3


@pytest.mark.parametrize("window", [0, 3], ids=["fixed", "weighted"])
def test_a_fraction_of_the_groups_comes_from_the_rungs_below_evenly(window):
    drawn = source(with_curriculum(window=window))
    counts = Counter(families_of(drawn, 800, TOP))
    total = counts["one_bug"] + counts["two_bugs"] + counts["three_bugs"]
    assert total + counts["bugfix"] == 800 and (window or total == 600)
    for family, expected in (("one_bug", 0.125), ("two_bugs", 0.125), ("three_bugs", 0.75)):
        assert abs(counts[family] / total - expected) < 4 * (expected * (1 - expected) / total) ** 0.5
    assert len({drawn.task(number).id for number in range(800)}) == 800, "no task comes twice"


@pytest.mark.parametrize("window", [0, 3], ids=["fixed", "weighted"])
def test_draws_are_functions_of_number_seed_and_results(window):
    config = with_curriculum(window=window)
    whole, again, other = source(config), source(config), source(config, seed=1)
    for number in range(200):
        results = (TOP * 2)[: number // 20]
        whole.draw(number, results)
        other.draw(number, results)
        if number == 100:  # another process goes on
            places, again = again.places, source(config)
            again.restore(places)
        again.draw(number, results)
    assert again.places == whole.places != other.places
    assert {family for family, _ in whole.places.values()} == {"bugfix", "one_bug", "two_bugs", "three_bugs"}


def test_episodes_have_the_compaction_of_the_rung_that_they_are_drawn_from():
    config = dataclasses.replace(with_curriculum(easier=0.0), family_compactions={"two_bugs": "late"})
    drawn = source(config)
    families_of(drawn, 8, UP)
    triggers = {spec.task.family: spec.compaction.trigger for number in range(8) for spec in drawn.specs(number)}
    assert triggers == {"bugfix": 132, "two_bugs": 400}


def test_the_weight_of_a_ladder_is_that_of_the_results_of_all_rungs():
    config = CurriculumConfig(window=2, floor=0.1, turns=1.0, ladders=LADDERS)
    results = [
        {"one_bug": {"groups": 1, "spread": 0.0, "turns": 2.0, "thinking": 0.0, "grade": 1.0}},
        {
            "three_bugs": {"groups": 1, "spread": 0.16, "turns": 4.0, "thinking": 0.0, "grade": 0.2},
            "bugfix": {"groups": 1, "spread": 0.0, "turns": 9.0, "thinking": 0.0, "grade": 0.0},
        },
    ]
    expected = {"one_bug": 3 * (0.1 + 0.32) * 3 / 6, "bugfix": 0.1 * 9 / 6}
    assert family_weights(GROUPS, results, config) == pytest.approx(expected)


def path_tasks(family: str, count: int) -> TaskSource:
    """A source in which a path holds tasks of a family."""
    tasks = TaskSource(0, TASKS)
    tasks.train = {family: [tasks.generate(family, "train", 0, index) for index in range(count)]}
    return tasks


def test_the_tasks_of_rungs_are_there_for_the_whole_run_and_listed_for_a_resumed_one():
    path_tasks("two_bugs", 30).require(GROUPS, 10, LADDERS)
    with pytest.raises(UserError, match="one_bug=3, .* from 'two_bugs', in rl.steps=10 are 30 .* holds 29"):
        path_tasks("two_bugs", 29).require(GROUPS, 10, LADDERS)
    with pytest.raises(UserError, match="ladders.one_bug names the task family 'four_bugs'"):
        TaskSource(0, TASKS).require(GROUPS, 1, {"one_bug": ("four_bugs",)})
    tasks = path_tasks("two_bugs", 2)
    assert CONFIG.families == {"bugfix", "one_bug", "two_bugs", "three_bugs"}
    assert tasks.drawn(CONFIG.families) == {"two_bugs": [task.id for task in tasks.train["two_bugs"]]}
    assert tasks.drawn(RLConfig(groups=GROUPS).families) == {}


def test_a_rung_whose_tasks_are_used_up_is_left_out_of_the_weighted_draws():
    drawn = source(with_curriculum(window=3, easier=0.0), tasks=path_tasks("two_bugs", 5))
    counts = Counter(families_of(drawn, 60, UP))
    assert counts == {"two_bugs": 5, "bugfix": 55}


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_ladder_is_switched_off_with_its_family():
    config = dataclasses.replace(CONFIG, groups={"bugfix": 1, "one_bug": 0, "three_bugs": 1})
    assert config.families == {"bugfix", "three_bugs"}
    solved = [family_results([[episode(1.0, family="three_bugs")]])]
    weights = family_weights(config.groups, solved, dataclasses.replace(config.curriculum, window=1))
    assert weights["three_bugs"] < weights["bugfix"], "its results are its own"


# -- a run -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def grade_families(monkeypatch):
    """family -> probability that an episode of it is solved: the tasks and grades of simulated runs."""

    def patch(**rates: float) -> None:
        made = simulated.simulated_harness

        def harness(policy):
            run_episode = made(policy)

            async def graded(spec, session, context):
                played = await run_episode(spec, session, context)
                solved = random.Random(spec.seed).random() < rates[spec.task.family]
                return dataclasses.replace(played, reward=float(solved))

            return graded

        monkeypatch.setattr(simulated, "TASKS", TASKS)
        monkeypatch.setattr(simulated, "simulated_harness", harness)

    return patch


def test_a_run_climbs_and_its_steps_say_which_rung_they_are_on(grade_families, tmp_path, monkeypatch):
    grade_families(bugfix=0.5, one_bug=1.0, two_bugs=1.0, three_bugs=0.5)
    config = dataclasses.replace(with_curriculum(easier=0.0), steps=7)
    run = run_virtually(Simulation(tmp_path, config, drawn_play).run(monkeypatch))
    assert [run.rows[number]["rung_one_bug"] for number in range(1, 8)] == [1, 1, 2, 2, 3, 3, 3]
    played = [next(family for family in batch.families if family != "bugfix") for batch in run.batches()]
    assert played == ["one_bug"] * 2 + ["two_bugs"] * 2 + ["three_bugs"] * 3


MOVING = dataclasses.replace(with_curriculum(promote_above=0.6, fall_below=0.4), steps=12)


@pytest.mark.parametrize(
    "config", [MOVING, dataclasses.replace(MOVING, max_staleness=2, deterministic=True)], ids=["synchronous", "ahead"]
)
def test_a_killed_run_is_on_the_same_rung_afterwards(grade_families, tmp_path, monkeypatch, config):
    grade_families(bugfix=0.5, one_bug=0.9, two_bugs=0.8, three_bugs=0.1)
    whole = run_virtually(Simulation(tmp_path / "whole", config, drawn_play, learn_s=2.0).run(monkeypatch))
    columns = [whole.rows[number]["rung_one_bug"] for number in range(1, 13)]
    assert max(columns) > 1 and any(a > b for a, b in zip(columns, columns[1:], strict=False)), "it climbs and falls"
    rng = random.Random(0)
    for trial in range(2):
        killed = Simulation(tmp_path / f"{trial}", config, drawn_play, learn_s=2.0)
        for _ in range(3):
            run_virtually(killed.run(monkeypatch, kill_at=rng.uniform(0, whole.seconds)))
        run_virtually(killed.run(monkeypatch))
        assert killed.batches() == whole.batches()
        assert [killed.rows[number]["rung_one_bug"] for number in range(1, 13)] == columns
