"""Tasks on disk: a written task is read back, and its directory works without this library."""

import dataclasses
import json
import subprocess
import sys
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_jax.demo import bugfix
from composer_jax.errors import UserError
from composer_jax.tasks import Case, CaseGrader, Task
from composer_jax.tasks.harbor import read_task, write_task
from tests.demo.generate import generate

TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
NAME = st.text(
    st.characters(codec="utf-8", exclude_characters="/\\\0", exclude_categories=["Cc"]),
    min_size=1,
    max_size=20,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("family", "split"), [("bugfix", "unseen"), ("two_bugs", "train"), ("memory_chain", "heldout")]
)
def test_generated_tasks_survive_a_round_trip(tmp_path, family, split):
    for index in range(5):
        task = generate(family, split, 0, index)
        back = read_task(write_task(task, tmp_path / task.id))
        assert back == task
        assert back.digest == task.digest


@given(
    task_id=TEXT,
    instruction=TEXT,
    files=st.dictionaries(NAME.filter(lambda name: name not in (".", "..", "pkg")), TEXT, max_size=3),
    args=st.lists(JSON, max_size=3),
    want=JSON,
    metadata=st.dictionaries(TEXT, JSON, max_size=3),
)
def test_any_text_survives_a_round_trip(tmp_path_factory, task_id, instruction, files, args, want, metadata):
    task = Task(
        id=task_id,
        family='quo"ted \\ \x7f',
        split="train",
        instruction=instruction,
        files=files | {"pkg/deep/module.py": "line\r\nend"},
        tools=("read", 'od"d'),
        grader=CaseGrader((Case("module", "f", tuple(args), want),), timeout_s=1.5),
        metadata=metadata,
    )
    assert read_task(write_task(task, tmp_path_factory.mktemp("task") / "t")) == task


@pytest.mark.parametrize("bugs", [1, 2])
def test_the_directory_works_on_its_own(tmp_path, bugs):
    task = bugfix.generate("train", 0, 3, bugs=bugs)
    root = write_task(task, tmp_path / "task")
    tests, repo, logs = root / "tests", root / "environment" / "repo", tmp_path / "logs"

    def verify():
        command = [sys.executable, "-I", str(tests / "verify.py"), str(tests), str(repo), str(logs)]
        subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
        return json.loads((logs / "reward.json").read_text())

    before = verify()
    assert before["reward"] == 0.0 and 0 < before["hidden"] < 1
    solve = [sys.executable, str(root / "solution/solve.py"), str(root / "solution/oracle.json"), str(repo)]
    subprocess.run(solve, check=True)
    assert verify() == {"reward": 1.0, "hidden": 1.0}
    assert subprocess.run(solve, capture_output=True).returncode != 0, "there is nothing left to solve"


def test_the_manifest_follows_the_format(tmp_path):
    task = generate("bugfix", "heldout", 0, 0)
    root = write_task(task, tmp_path / "task")
    manifest = tomllib.loads((root / "task.toml").read_text())
    assert manifest["schema_version"] == "1.0"
    assert manifest["task"]["name"] == f"composer-jax/{task.id}"
    assert manifest["environment"] == {"allow_internet": False}
    assert manifest["verifier"]["timeout_sec"] > task.grader.timeout_s
    assert manifest["metadata"]["composer"]["split"] == "heldout"
    assert (root / "instruction.md").read_text() == task.instruction
    # What the agent's container is built from holds neither answers nor expected values.
    visible = "".join(path.read_text() for path in (root / "environment").rglob("*") if path.is_file())
    assert not any(bug["new"] in visible for bug in task.metadata["bugs"])


def test_bad_directories_are_refused(tmp_path):
    task = generate("bugfix", "train", 0, 0)
    root = write_task(task, tmp_path / "task")
    lacking, broken = (write_task(task, tmp_path / name) for name in ("lacking", "broken"))
    (lacking / "task.toml").write_text("[metadata.composer]\nid = 'x'\n")
    (broken / "task.toml").write_text("not toml")
    for use, word in (
        (lambda: write_task(task, root), "is not empty"),
        (lambda: read_task(tmp_path / "nowhere"), "nowhere cannot be read"),
        (lambda: read_task(lacking), "lacks 'family'"),
        (lambda: read_task(broken), "cannot be read"),
    ):
        with pytest.raises(UserError, match=word):
            use()


@pytest.mark.parametrize("path", ["../out.py", "/etc/passwd", "a/../../b", "", "a\\b"])
def test_paths_out_of_the_workspace_are_refused(tmp_path, path):
    task = generate("bugfix", "train", 0, 0)
    bad = Task.from_json({**task.to_json(), "files": {path: "x"}})
    with pytest.raises(UserError, match="leads out of the workspace"):
        write_task(bad, tmp_path / "task")
    assert not (tmp_path / "task").exists()


def test_tasks_without_cases_or_with_a_typo_in_the_split_are_refused():
    with pytest.raises(UserError, match="at least one hidden case"):
        CaseGrader(())
    with pytest.raises(UserError, match="split 'test'; use one of train, heldout, unseen"):
        Task.from_json({**generate("bugfix", "train", 0, 0).to_json(), "split": "test"})


def test_json_and_identity():
    task = generate("bugfix", "train", 0, 0)
    again = Task.from_json(json.loads(json.dumps(task.to_json())))
    assert again == task and hash(again) == hash(task)
    limited = dataclasses.replace(task, max_turns=7)
    assert Task.from_json(json.loads(json.dumps(limited.to_json()))).max_turns == 7 and limited != task
    older = limited.to_json()
    del older["max_turns"]
    assert Task.from_json(older) == task
    renamed = Task.from_json({**task.to_json(), "id": "another"})
    assert renamed != task and renamed.digest == task.digest
    assert task != "a string"
