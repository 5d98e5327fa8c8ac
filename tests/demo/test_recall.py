"""Recall tasks: the instruction names the fact, the tests do not reveal it, the hidden cases pin it."""

import asyncio
import json

import pytest

from composer_jax.demo import recall
from composer_jax.demo.generate import generate
from composer_jax.demo.recall import fact_line
from composer_jax.errors import UserError
from composer_jax.tasks.grading import grade, initial_changes
from tests.tasks.conftest import as_changes


def completed(task, line=None):
    know = task.metadata
    text = task.files[know["path"]]
    assert text.count(know["old"]) == 1
    return {**task.files, know["path"]: text.replace(know["old"], line or know["new"])}


def test_a_task_is_a_function_of_its_arguments():
    assert recall.generate("train", 3, 5) == recall.generate("train", 3, 5)
    digests = {recall.generate("heldout", 0, index).digest for index in range(3000)}
    assert len(digests) == 3000


def test_facts_are_readable_and_told_apart_by_their_first_digit():
    for index in range(300):
        task = recall.generate("heldout", 1, index)
        know = task.metadata
        lines = task.files[know["conf"]].split("\n")
        assert [fact_line(k, v) for k, v in know["facts"].items()] == lines[:5]
        assert lines[5] == ""
        assert len({v // 10 for v in know["facts"].values()}) == 5
        assert all(10 <= v <= 99 for v in know["facts"].values())
        for part in (know["function"], know["path"], know["key"], know["conf"]):
            assert part in task.instruction
        assert str(know["facts"][know["key"]]) not in task.instruction + task.files[know["path"]]


def test_visible_tests_pass_before_and_after_and_reveal_nothing():
    for index in range(100):
        task = recall.generate("train", 2, index)
        [[module, function, args, want]] = json.loads(task.files["cases.json"])
        assert (f"{module}.py", function) == (task.metadata["path"], task.metadata["function"])
        assert (args, want) == ([0], 0)


def test_size_of_the_configuration():
    small = recall.generate("train", 0, 0, facts=1, fillers=0)
    assert len(small.metadata["facts"]) == 1
    assert "def " not in small.files[small.metadata["conf"]]
    assert recall.generate("heldout", 0, 0, facts=8).metadata["facts"]
    with pytest.raises(UserError, match="9 facts"):
        recall.generate("train", 0, 0, facts=9)


def test_one_function_generates_tasks_of_both_families():
    assert generate("recall", "train", 0, 1) == recall.generate("train", 0, 1)
    assert generate("bugfix", "train", 0, 1).family == "bugfix"
    with pytest.raises(UserError, match="'swe' is no task family of the demo; use bugfix or recall"):
        generate("swe", "train", 0, 0)


def test_in_a_real_sandbox(pool):
    async def check():
        task = recall.generate("train", 5, 0)
        value = task.metadata["facts"][task.metadata["key"]]
        for files in (task.files, completed(task)):
            sandbox = await pool.acquire(files)
            assert (await sandbox.run(["python", "run_tests.py"])).stdout == "PASS 1\n"
            await sandbox.close()
        assert (await grade(task, initial_changes(task), pool)).reward == 0.0
        assert (await grade(task, as_changes(completed(task)), pool)).reward == 1.0
        assert (await grade(task, as_changes(completed(task, f"return x * {value + 1}")), pool)).reward == 0.0

    asyncio.run(check())
