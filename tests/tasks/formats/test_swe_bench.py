"""Rows of SWE-bench: their fields become a task that only the solution solves."""

import asyncio
import dataclasses
import json
import shutil

import pytest

from composer_jax.errors import UserError
from composer_jax.sandbox import Change
from composer_jax.tasks import LogGrader, Task
from composer_jax.tasks.formats import ReadOptions, read_tasks
from composer_jax.tasks.grading import grade
from composer_jax.tasks.patches.git_diff import changes_from_patch
from composer_jax.tasks.validate import gold_changes

EVAL = {"eval_script": "echo", "log_parser": "parse_log_pytest", "eval_type": "pass_and_fail"}


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def options(project, packages):
    """ReadOptions with everything that the project's row needs to run without an image."""
    return dataclasses.replace(project.options, packages=packages)


@pytest.fixture
def read(tmp_path, options):
    """Returns a function that reads one row with other fields or options."""

    def read(row, other=None, **fields):
        row = {key: value for key, value in {**row, **fields}.items() if value is not ...}
        (task,) = read_tasks(write_rows(tmp_path / "rows.jsonl", row), other or options)
        return task

    return read


def test_a_row_becomes_a_task(read, bench_row, project, packages):
    task = read(bench_row, difficulty="15 min - 1 hour")
    assert (task.id, task.family, task.split, task.image) == ("acme__calc-7", "swe_bench", "heldout", None)
    assert "double(3) is 5" in task.instruction and "look at double" not in task.instruction
    assert (task.repository / "calc.py").read_text() == project.buggy
    # Nothing of the history is there; what export-ignore would leave out of an archive is.
    names = {path.relative_to(task.repository).as_posix() for path in task.repository.rglob("*")}
    assert names == {".gitattributes", "calc.py", "tests", "tests/test_calc.py"}
    assert task.packages == (packages / "acme__calc").resolve()
    assert task.grader.fail_to_pass == ("tests/test_calc.py::test_double",)
    assert task.grader.pass_to_pass == ("tests/test_calc.py::test_half",)
    assert (task.grader.tests / "tests/test_calc.py").read_text() == project.new_test
    assert task.metadata["difficulty"] == "15 min - 1 hour"
    assert task.metadata["hints_text"] == "look at double"
    assert task.metadata["environment_setup_commit"] == project.base
    assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task


def test_only_the_solution_solves_it(read, bench_row, project, pool):
    task = read(bench_row)
    gold = gold_changes(task)
    assert gold == {"calc.py": Change("file", project.right.encode())}
    breaks = {"calc.py": Change("file", project.right.replace("x / 2", "x").encode())}

    async def rewards():
        return [(await grade(task, changes, pool)).reward for changes in ({}, gold, breaks)]

    assert asyncio.run(rewards()) == [0.0, 1.0, 0.0]


def test_a_checkout_is_made_once(read, bench_row, project):
    first = read(bench_row).repository
    shutil.rmtree(project.folder)
    project.folder.mkdir()
    (project.folder / "HEAD").write_text("nothing")
    assert read(bench_row).repository == first


@pytest.mark.parametrize("layout", ["acme/calc", "acme__calc.git"])
def test_mirrors_may_be_called_in_either_way_and_be_bare(read, bench_row, project, tmp_path, layout):
    other = tmp_path / "other"
    (other / layout).parent.mkdir(parents=True)
    if layout.endswith(".git"):
        project.git(tmp_path, "clone", "--quiet", "--bare", str(project.folder), str(other / layout))
    else:
        shutil.copytree(project.folder, other / layout)
    task = read(bench_row, ReadOptions(repos=other, store=tmp_path / "other store"), **EVAL)
    assert (task.repository / "calc.py").read_text() == project.buggy


def test_without_packages_a_row_needs_its_image_and_a_script_for_it(read, bench_row, project):
    task = read(bench_row, project.options, **EVAL)
    assert task.image == "swebench/sweb.eval.x86_64.acme_1776_calc-7"
    assert isinstance(task.grader, LogGrader) and task.packages is None and task.repository is not None
    assert read(bench_row, project.options, **EVAL, image="acme/own:1").image == "acme/own:1"
    with pytest.raises(
        UserError, match="no eval_script for its image, .* it needs pytest ids, its repository .repos. and"
    ):
        read(bench_row, project.options)


def test_rows_of_other_languages_are_graded_by_their_log(read, bench_row):
    names = {"FAIL_TO_PASS": '["TestDouble"]', "PASS_TO_PASS": '["TestHalf"]'}
    more = {"eval_script": "go test ./...", "log_parser": "parse_log_gotest", "eval_type": "fail_only"}
    task = read(bench_row, **names, **more)
    assert task.grader == LogGrader("go test ./...", "parse_log_gotest", ("TestDouble",), ("TestHalf",), True)
    assert task.image == "swebench/sweb.eval.x86_64.acme_1776_calc-7"
    assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task
    with pytest.raises(UserError, match="cannot be graded: it has no eval_script"):
        read(bench_row, **names)
    with pytest.raises(UserError, match="line 1: the log parser 'parse_log_fortran' is unknown"):
        read(bench_row, **names, **{**more, "log_parser": "parse_log_fortran"})


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"base_commit": "0" * 40}, "has no readable commit 0000"),
        ({"base_commit": "--upload-pack=x"}, "is not a repository owner/name and a commit hash"),
        ({"repo": "../../etc"}, "is not a repository owner/name and a commit hash"),
        ({"repo": "acme/other"}, "holds no git repository acme__other or acme/other; clone it there"),
        ({"instance_id": "../x"}, "instance_id = '../x'; it may hold letters"),
        ({"FAIL_TO_PASS": "[]"}, "empty FAIL_TO_PASS; it must name at least one test"),
        ({"FAIL_TO_PASS": "not json"}, "FAIL_TO_PASS that is not a list of texts: 'not json'"),
        ({"FAIL_TO_PASS": [1]}, r"FAIL_TO_PASS that is not a list of texts: \[1\]"),
        ({"problem_statement": None}, "line 1 has no problem_statement; it must be a text"),
        ({"patch": 3}, "line 1 has patch = 3; it must be a text"),
        ({"test_patch": "no diff"}, "the patch does not fit"),
        ({**EVAL, "eval_type": "maybe"}, "eval_type = 'maybe'; it is pass_and_fail or fail_only"),
    ],
)
def test_broken_rows_are_refused(read, bench_row, fields, sentence):
    with pytest.raises(UserError, match=sentence):
        read(bench_row, **fields)


def test_rows_that_cannot_be_used_are_left_out_and_counted(bench_row, options, tmp_path, caplog):
    rows = [{**bench_row, "instance_id": f"acme__calc-{number}"} for number in range(6)]
    rows[1]["repo"] = "x/y"
    for number in range(2, 6):
        rows[number] |= {**EVAL, "FAIL_TO_PASS": '["TestDouble"]', "log_parser": "parse_log_bpmn_js"}
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    skipped = []
    assert [task.id for task in read_tasks(path, options, skipped)] == ["acme__calc-0"]
    assert len(skipped) == 5 and "x__y" in skipped[0] and "line 3: the log parser 'parse_log_bpmn_js'" in skipped[1]
    assert [task.id for task in read_tasks(path, options)] == ["acme__calc-0"]
    (sentence,) = [record.getMessage() for record in caplog.records]
    assert sentence.startswith(f"5 of 6 tasks of {path} are left out: ") and sentence.endswith("; and 2 more.")
    assert "line 4: the log parser 'parse_log_bpmn_js'" in sentence
    with pytest.raises(UserError, match="line 1: the log parser 'parse_log_bpmn_js'"):
        read_tasks(write_rows(path, *rows[2:]), options, skipped)
    with pytest.raises(UserError, match="holds the task acme__calc-7 twice"):
        read_tasks(write_rows(path, bench_row, bench_row), options)


def test_parquet_is_read_like_lines(bench_row, options, tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'composer_jax[tasks]'")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    listed = {**bench_row, "instance_id": "acme__calc-8", "PASS_TO_PASS": ["tests/test_calc.py::test_half"]}
    listed["FAIL_TO_PASS"] = ["tests/test_calc.py::test_double"]
    for row in (bench_row, listed):
        parquet.write_table(pyarrow.Table.from_pylist([row]), path)
        (task,) = read_tasks(path, options)
        (line,) = read_tasks(write_rows(tmp_path / "rows.jsonl", row), options)
        assert task == line
    path.write_bytes(b"PAR1 but no more")
    with pytest.raises(UserError, match="is not a readable Parquet file"):
        read_tasks(path)


def test_a_repository_of_tasks_of_version_5_is_read(bench_row, project, tmp_path):
    folder = tmp_path / "tasks-of-5" / "tasks" / "acme__calc-7"
    folder.mkdir(parents=True)
    (tmp_path / "tasks-of-5" / "sweb.yaml").write_text("version: 5\n")
    (folder / "task.yaml").write_text(
        f"instance_id: acme__calc-7\nrepo: acme/calc\nversion: '1.0'\nbase_commit: {project.base}\nsplit: test\n"
        "image: acme/own:1\nlog_parser: parse_log_pytest\neval_type: pass_and_fail\ncreated_at: 2024-01-01\n"
    )
    tests = {"FAIL_TO_PASS": ["test_double"], "PASS_TO_PASS": ["test_half"]}
    files = {"problem_statement.md": "double", "hints.md": "hint", "gold.patch": project.patch, "eval.sh": "make test"}
    for name, text in {**files, "test.patch": project.test_patch, "tests.json": json.dumps(tests)}.items():
        (folder / name).write_text(text)
    (task,) = read_tasks(tmp_path / "tasks-of-5")
    assert task.image == "acme/own:1" and task.repository is None
    assert task.grader == LogGrader("make test", "parse_log_pytest", ("test_double",), ("test_half",))
    assert task.metadata["created_at"] == "2024-01-01" and task.metadata["hints_text"] == "hint"
    assert gold_changes(task) is None
    (folder / "gold.patch").unlink()
    with pytest.raises(UserError, match="acme__calc-7 has no patch"):
        read_tasks(tmp_path / "tasks-of-5")
    (folder / "task.yaml").write_text("a: [")
    with pytest.raises(UserError, match="task.yaml is not YAML"):
        read_tasks(tmp_path / "tasks-of-5")


def test_patches_with_unusual_names_modes_and_renames(tmp_path, project):
    folder = project.folder
    old = project.commit(folder, {"dir/a b.txt": "one\n", "tö.txt": "two\n", "run.sh": "echo\n", "-- odd": "3\n"})
    project.git(folder, "mv", "dir/a b.txt", "dir/c d.txt")
    (folder / "run.sh").chmod(0o755)
    new = project.commit(folder, {"tö.txt": "TWO\n", "-- odd": "4\n", 'q"uote.txt': "5"})
    patch = project.git(folder, "diff", "-M", old, new) + "\n"
    project.git(folder, "checkout", "--quiet", old)
    changes = changes_from_patch(folder, patch)
    assert {path: (change.kind, change.data) for path, change in changes.items()} == {
        "dir/a b.txt": ("gone", b""),
        "dir/c d.txt": ("file", b"one\n"),
        "tö.txt": ("file", b"TWO\n"),
        "run.sh": ("file", b"echo\n"),
        "-- odd": ("file", b"4\n"),
        'q"uote.txt': ("file", b"5"),
    }
    assert changes["run.sh"].mode & 0o100
    project.git(folder, "checkout", "--quiet", new)
    assert set(changes_from_patch(folder, patch, reverse=True)) == set(changes)


@pytest.mark.parametrize("path", ["../out", "/tmp/out", "sub/../../out"])
def test_a_patch_cannot_write_outside(tmp_path, path):
    (tmp_path / "folder").mkdir()
    patch = f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+x\n"
    with pytest.raises(UserError, match="does not fit"):
        changes_from_patch(tmp_path / "folder", patch)
