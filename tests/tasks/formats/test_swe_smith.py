"""Rows of SWE-smith, whose patch is the bug and not its repair."""

import asyncio
import dataclasses
import json

import pytest

from composer_jax.errors import UserError
from composer_jax.sandbox import Change
from composer_jax.tasks.formats import ReadOptions, read_tasks
from composer_jax.tasks.grading import grade
from composer_jax.tasks.validate import gold_changes


@pytest.fixture
def smith_row(project):
    """The bug of the project's first commit, put into its second."""
    bug = project.git(project.folder, "diff", project.fixed, project.base, "--", "calc.py") + "\n"
    return {
        "instance_id": f"acme__calc.{project.fixed[:8]}.func_pm_op_change__abc",
        "repo": "acme/calc",
        "patch": bug,
        "FAIL_TO_PASS": ["tests/test_calc.py::test_double"],
        "PASS_TO_PASS": ["tests/test_calc.py::test_half"],
        "created_at": "2025-01-01",
        "image_name": "swesmith/acme_1776_calc",
        "base_commit": project.fixed,
        "problem_statement": "double is wrong",
    }


@pytest.fixture
def read(tmp_path, project):
    def read(row, options=None):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row) + "\n")
        (task,) = read_tasks(path, options or project.options)
        return task

    return read


def test_the_patch_is_the_bug(read, smith_row, project):
    task = read(smith_row)
    assert (task.family, task.split, task.image) == ("swe_smith", "train", "swesmith/acme_1776_calc")
    assert (task.repository / "calc.py").read_text() == project.buggy
    assert "double is wrong" in task.instruction
    assert gold_changes(task) == {"calc.py": Change("file", project.right.encode())}


def test_the_commit_may_have_the_bug_already_or_be_in_the_name_only(read, smith_row, project):
    branch = project.commit(project.folder, {"calc.py": project.buggy})
    there = read({**smith_row, "base_commit": branch})
    assert there.repository.name == f"acme__calc@{branch}"
    named = read({key: value for key, value in smith_row.items() if key != "base_commit"})
    for task in (there, named):
        assert (task.repository / "calc.py").read_text() == project.buggy
        assert set(gold_changes(task)) == {"calc.py"}


def test_only_the_repair_solves_it_and_a_missing_test_fails(read, smith_row, project, packages, pool):
    options = dataclasses.replace(project.options, packages=packages)
    task = read(smith_row, options)
    assert task.image is None and task.packages is not None
    never = read({**smith_row, "PASS_TO_PASS": ["tests/test_calc.py::test_that_never_was"]}, options)

    async def rewards():
        gold = gold_changes(task)
        return [(await grade(*what, pool)).reward for what in ((task, {}), (task, gold), (never, gold))]

    assert asyncio.run(rewards()) == [0.0, 1.0, 0.0]


def test_a_row_without_an_issue_names_a_test_and_not_the_change(read, smith_row):
    for missing in ("", None):
        task = read({**smith_row, "problem_statement": missing})
        assert "tests/test_calc.py::test_double" in task.instruction
        assert "x * 2" not in task.instruction


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"patch": " "}, "has an empty patch; it must be the diff that injects the bug"),
        ({"patch": "nonsense"}, "the patch does not fit"),
        ({"image_name": None}, "has no image_name"),
        ({"instance_id": "x", "base_commit": None}, "neither a base_commit nor one in its instance_id 'x'"),
        ({"FAIL_TO_PASS": []}, "empty FAIL_TO_PASS"),
    ],
)
def test_broken_rows_are_refused(read, smith_row, fields, sentence):
    with pytest.raises(UserError, match=sentence):
        read({**smith_row, **fields})


def test_without_the_repository_there_is_no_task(read, smith_row, tmp_path):
    with pytest.raises(UserError, match=r"needs the repository acme/calc; give the folder of repositories \(repos\)"):
        read(smith_row, ReadOptions(store=tmp_path / "store"))
    with pytest.raises(UserError, match="the folder .*nowhere of repositories does not exist"):
        read(smith_row, ReadOptions(repos=tmp_path / "nowhere", store=tmp_path / "store"))
