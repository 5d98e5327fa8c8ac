"""Whatever a path holds: tasks, or one sentence."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_jax.errors import UserError
from composer_jax.tasks import Task
from composer_jax.tasks.formats import Options, read_tasks

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PLAUSIBLE = {
    "repo": st.sampled_from(["acme/calc", "acme/other", "../x", ""]),
    "instance_id": st.sampled_from(["a__b-1", "a__b.01234567.x__y", "/etc"]),
    "base_commit": st.sampled_from(["0" * 40, "HEAD", "-x"]),
    "patch": st.sampled_from(["", "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n", "diff --git"]),
    "test_patch": st.just(""),
    "problem_statement": st.text(max_size=20),
    "FAIL_TO_PASS": st.sampled_from(['["a.py::b"]', ["TestA"], "[", []]),
    "PASS_TO_PASS": st.sampled_from(["[]", ["a.py::c"], None]),
    "eval_script": st.just("true"),
    "log_parser": st.just("parse_log_gotest"),
    "eval_type": st.sampled_from(["pass_and_fail", "fail_only"]),
    "image_name": st.just("image"),
}
ROWS = st.fixed_dictionaries({}, optional={name: value | JSON for name, value in PLAUSIBLE.items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@settings(max_examples=150)
@given(row=ROWS, with_repos=st.booleans())
def test_any_row_gives_tasks_or_one_sentence(folder, row, with_repos):
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (folder / "repos").mkdir(exist_ok=True)
    options = Options(repos=folder / "repos" if with_repos else None, store=folder / "store")
    try:
        tasks = read_tasks(path, options)
    except UserError as error:
        assert str(error) and "\n" not in str(error)
    else:
        assert all(isinstance(task, Task) and task.to_json() for task in tasks)


@settings(max_examples=100)
@given(content=st.binary(max_size=80) | st.lists(JSON, max_size=3).map(lambda rows: json.dumps(rows).encode()))
def test_any_file_gives_one_sentence(folder, content):
    path = folder / "any.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError):
        read_tasks(path)


@settings(max_examples=100)
@given(toml=st.text(max_size=60), dockerfile=st.text(max_size=60) | st.text(max_size=30).map("COPY {} /app".format))
def test_any_directory_gives_a_task_or_one_sentence(folder, toml, dockerfile):
    path = folder / "task"
    for name, text in {"task.toml": toml, "instruction.md": "x", "tests/test.sh": "x"}.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text, errors="replace")
    (path / "environment").mkdir(exist_ok=True)
    (path / "environment/Dockerfile").write_text(dockerfile, errors="replace")
    try:
        read_tasks(path, Options(store=folder / "store"))
    except UserError as error:
        assert str(error)


def test_paths_that_hold_no_tasks_are_told(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "other.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n[1]\n')
    (tmp_path / "folder").mkdir()
    for name, sentence in {
        "nowhere": "there is no .*nowhere; give a folder of tasks or a file of rows",
        "notes.txt": "files of rows end in .jsonl or .parquet",
        "empty.jsonl": "there are no tasks in .*empty.jsonl",
        "folder": "there are no tasks in .*folder",
        "other.jsonl": "other.jsonl, line 1 is a row neither of SWE-bench nor of SWE-smith; it has 'prompt'",
        "bad.jsonl": "bad.jsonl, line 2 is no JSON object but a list",
    }.items():
        with pytest.raises(UserError, match=sentence):
            read_tasks(tmp_path / name)
