"""Bugs without a specification: only trying shows the repair, and the turns suffice if nothing is wasted."""

import asyncio
import dataclasses

import pytest

from composer_jax.agent.episode import EpisodeLimits
from composer_jax.agent.summary import Compaction
from composer_jax.demo import bugfix_expert
from composer_jax.demo.expert import make_traces
from composer_jax.demo.functions import KINDS, SEARCHABLE_KINDS
from composer_jax.demo.unspecified import OneBug, ThreeBugs, TwoBugs
from composer_jax.errors import UserError
from tests.demo.repairs import failing, hidden, passes, repaired, right_lines, states, visible

FAMILIES = [OneBug(), TwoBugs(), ThreeBugs()]


@pytest.fixture(params=FAMILIES, ids=lambda family: family.FAMILY)
def family(request):
    return request.param


def test_a_task_is_a_function_of_its_arguments(family):
    assert family.generate("train", 3, 5) == family.generate("train", 3, 5)
    tasks = [family.generate(split, seed, i) for split in ("train", "heldout") for seed in (0, 1) for i in range(50)]
    assert len({task.digest for task in tasks}) == len({task.id for task in tasks}) == len(tasks)
    assert {task.family for task in tasks} == {family.FAMILY}


def test_as_many_functions_fail_as_the_family_says(family):
    for index in range(60):
        task = family.generate("heldout", 0, index)
        broken = {bug["function"] for bug in task.metadata["bugs"]}
        assert len(broken) == len(task.metadata["bugs"]) == family.BUGS
        assert failing(task.files, visible(task)) == failing(task.files, hidden(task)) == broken


def test_nothing_says_what_a_function_should_return(family):
    for index in range(60):
        task = family.generate("train", 1, index)
        modules = [text for path, text in task.files.items() if path.endswith(".py") and path != "run_tests.py"]
        assert sum(text.count("def ") for text in modules) == 4
        assert not any("#" in text for text in (*modules, task.files["cases.json"]))
        assert task.instruction == "Fix the failing test."


def test_visible_tests_pass_where_every_bug_is_repaired_and_hidden_ones_agree(family):
    """Every state that an agent reaches with lines of the bugs' kinds; one wrong line in it fails both."""
    for index in range(20):
        task = family.generate("heldout", 2, index)
        right = 0
        for lines in states(task):
            files, is_right = repaired(task, lines), lines == right_lines(task)
            assert all(passes(files, visible(task))) == all(passes(files, hidden(task))) == is_right, (task.id, lines)
            right += is_right
        assert right == 1


def test_kinds_are_those_with_few_repairs():
    kinds = {OneBug().generate("train", 0, index).metadata["kind"] for index in range(100)}
    assert kinds == set(SEARCHABLE_KINDS) == set(KINDS) - {"constant", "composed"}


def test_turns_grow_with_the_bugs():
    assert [family.generate("train", 0, 0).max_turns for family in FAMILIES] == [9, 10, 11]


def test_three_bugs_take_nine_messages_if_nothing_is_looked_at_twice(pool, tok, slip_rate, monkeypatch):
    """The repairs are known here: the script of the other family's expert, as if the tests had told it."""
    slip_rate(0.0)
    tasks = [dataclasses.replace(ThreeBugs().generate("heldout", 3, i), family="bugfix") for i in range(3)]
    limits = EpisodeLimits(max_turns=50, max_turn_tokens=100, max_episode_tokens=6000)

    def play(together):
        monkeypatch.setattr(bugfix_expert, "TOGETHER", together)
        episodes = asyncio.run(make_traces(tasks, lambda *_: Compaction(None), pool, tok, limits=limits))
        return {(episode.outcome, episode.reward, episode.turns) for episode in episodes}

    assert play(together=1.0) == {("finished", 1.0, 9)}
    assert play(together=0.0) == {("out_of_turns", 0.0, 11)}, "tests in messages of their own take one too many"


@pytest.mark.parametrize("several", FAMILIES[1:], ids=lambda family: family.FAMILY)
def test_no_expert_shows_several_bugs(pool, tok, several):
    tasks = [several.generate("train", 0, 0)]
    with pytest.raises(UserError, match=f"no expert for task family '{several.FAMILY}'; use bugfix or one_bug"):
        asyncio.run(make_traces(tasks, lambda *_: Compaction(None), pool, tok, limits=EpisodeLimits()))


def test_the_tests_name_the_function_and_nothing_else(pool):
    task = OneBug().generate("heldout", 4, 0)
    (bug,) = task.metadata["bugs"]

    async def outputs():
        sandbox = await pool.acquire(task.files)
        texts = []
        for line in (bug["old"], "return unknown", "raise SystemExit(0)", "return (", bug["new"]):
            await sandbox.write(bug["path"], repaired(task, {bug["function"]: line})[bug["path"]])
            texts.append((await sandbox.run(["python", "run_tests.py"])).stdout)
        await sandbox.close()
        return texts

    *wrong, broken_module, right = asyncio.run(outputs())
    assert wrong == [f"FAIL {bug['function']}\n"] * 3
    assert broken_module.startswith("FAIL ") and len(broken_module.split()) == 2
    assert right.startswith("PASS ")
