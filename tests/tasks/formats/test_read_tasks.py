"""Any path, row or directory gives tasks or one error sentence."""

import gzip
import json

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from composer_jax.errors import UserError
from composer_jax.tasks import Task
from composer_jax.tasks.formats import ReadOptions, read_tasks

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
GOOD = {
    "repo": "acme/calc",
    "instance_id": "acme__calc-1",
    "base_commit": "0" * 40,
    "patch": "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n",
    "test_patch": "",
    "problem_statement": "It is broken.",
    "FAIL_TO_PASS": '["TestA"]',
    "PASS_TO_PASS": ["TestB"],
    "eval_script": "true",
    "log_parser": "parse_log_gotest",
    "eval_type": "fail_only",
    "version": "1",
    "image": "image",
    "image_name": "image",
    "created_at": "2024-01-01",
}
# A good row in which a few fields are missing (...) or something else.
ROWS = st.dictionaries(st.sampled_from(sorted(GOOD)), st.just(...) | JSON, max_size=3).map(
    lambda other: {name: value for name, value in {**GOOD, **other}.items() if value is not ...}
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@settings(max_examples=50)
@example(row=GOOD, with_repos=False)
@given(row=ROWS | st.dictionaries(st.text(max_size=8), JSON, max_size=3), with_repos=st.booleans())
def test_any_row_gives_tasks_or_one_sentence(folder, row, with_repos):
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (folder / "repos").mkdir(exist_ok=True)
    options = ReadOptions(repos=folder / "repos" if with_repos else None, store=folder / "store")
    try:
        tasks = read_tasks(path, options)
    except UserError as error:
        assert str(error) and "\n" not in str(error)
        assert row != GOOD or with_repos
        event("refused")
    else:
        event("read")
        assert all(isinstance(task, Task) and task.to_json() for task in tasks)


@settings(max_examples=30)
@given(content=st.binary(max_size=80) | st.lists(JSON, max_size=3).map(lambda rows: json.dumps(rows).encode()))
def test_any_file_gives_one_sentence(folder, content):
    path = folder / "any.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError):
        read_tasks(path)


@settings(max_examples=30)
@given(toml=st.text(max_size=60), dockerfile=st.text(max_size=60) | st.text(max_size=30).map("COPY {} /app".format))
def test_any_directory_gives_a_task_or_one_sentence(folder, toml, dockerfile):
    path = folder / "task"
    for name, text in {"task.toml": toml, "instruction.md": "x", "tests/test.sh": "x"}.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text, errors="replace")
    (path / "environment").mkdir(exist_ok=True)
    (path / "environment/Dockerfile").write_text(dockerfile, errors="replace")
    try:
        read_tasks(path, ReadOptions(store=folder / "store"))
    except UserError as error:
        assert str(error)


def test_paths_without_tasks_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "other.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "x"}\n'))
    (tmp_path / "other.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n[1]\n')
    (tmp_path / "folder").mkdir()
    for name, sentence in {
        "nowhere": "nowhere does not exist; give a folder of tasks or a file of rows",
        "notes.txt": "is not a file of rows; their names end in .jsonl, .jsonl.gz, .jsonl.zst, .parquet",
        "empty.jsonl": "empty.jsonl holds no tasks",
        "folder": "folder holds no tasks",
        "other.jsonl": "other.jsonl, line 1 is neither a SWE-bench row nor a SWE-smith row; it has 'prompt'",
        "other.jsonl.gz": "other.jsonl.gz, line 1 is neither a SWE-bench row nor a SWE-smith row",
        "bad.jsonl": "bad.jsonl, line 2 is not a JSON object but a list",
    }.items():
        with pytest.raises(UserError, match=sentence):
            read_tasks(tmp_path / name)


OWN_FORMAT = """
from composer_jax.tasks.grader import Case, CaseGrader
from composer_jax.tasks.task import Task


def read_notes(path, options):
    if path.suffix != ".note":
        return None
    grader = CaseGrader((Case("add", "add", (1, 2), 3),))
    return [
        lambda line=line: Task(line, "notes", options.split or "train", line, {}, options.tools, grader)
        for line in path.read_text().splitlines()
    ]
"""


def test_a_format_of_the_user_is_named_by_import_path(tmp_path, monkeypatch):
    (tmp_path / "my_formats.py").write_text(OWN_FORMAT)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a.note").write_text("one\ntwo\n")
    (tmp_path / "b.note").write_text("")
    options = ReadOptions(formats=("my_formats:read_notes",))
    assert [task.instruction for task in read_tasks(tmp_path / "a.note", options)] == ["one", "two"]
    for path, formats, words in (
        ("b.note", ("my_formats:read_notes",), "b.note holds no tasks"),
        ("a.note", (), "is not a file of rows"),
        ("a.note", ("my_formats:nothing",), "tasks.formats='my_formats:nothing' cannot be imported"),
    ):
        with pytest.raises(UserError, match=words):
            read_tasks(tmp_path / path, ReadOptions(formats=formats))
