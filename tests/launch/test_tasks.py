"""launch.tasks, run as a command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from composer_jax.demo.generate import generate
from composer_jax.tasks.harbor import write_task
from composer_jax.tasks.task import Task

ROOT = Path(__file__).parents[2]


def run(*arguments):
    command = [sys.executable, "-m", "launch.tasks", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture
def folder(tmp_path):
    for index in range(2):
        task = generate("bugfix", "train", 0, index)
        write_task(task, tmp_path / task.id)
    return tmp_path


def test_validate_reports_invalid_tasks(folder):
    process = run("validate", folder, "--runs=2")
    assert (process.returncode, "2 of 2 tasks are valid in 2 runs" in process.stdout) == (0, True), process.stderr
    assert "validate: 2/2 tasks" in process.stderr

    task = generate("bugfix", "train", 0, 2)
    wrong = {"bugs": [{**bug, "new": bug["old"]} for bug in task.metadata["bugs"]]}
    write_task(Task.from_json({**task.to_json(), "metadata": wrong}), folder / "wrong")
    process = run("validate", "--runs=1", folder)
    assert process.returncode == 1
    assert f"{task.id}: wrong; gold scores 0" in process.stdout and "2 of 3 tasks are valid" in process.stdout
    report = json.loads((folder / "validation.json").read_text())
    assert [entry["verdict"] for entry in report] == ["valid", "valid", "wrong"]


def test_show_and_help(folder):
    task = generate("bugfix", "train", 0, 1)
    assert task.id in run("show", folder).stdout
    assert task.instruction in run("show", folder / task.id).stdout
    text = run("--help").stdout
    assert "python -m launch.tasks generate --repo=DIR" in text and "--kinds: generate: kinds of breakage" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "a command is missing"),
        (("make",), "'make' is not a command; use generate, validate, show"),
        (("validate",), "validate takes one path"),
        (("generate", "here"), "generate takes no path"),
        (("validate", "nowhere"), "nowhere does not exist"),
        (("generate", "--repo=."), "generate needs --out"),
        (("generate", "--repo=.", "--out=nowhere/out"), "the tests need pytest"),
        (("generate", "--repo=.", "--out=nowhere/out", "--packages=x", "--kinds=typo"), "'typo' is not a kind of task"),
    ],
)
def test_bad_command_lines_end_with_a_sentence(arguments, sentence):
    process = run(*arguments)
    assert process.returncode == 2 and sentence in process.stderr and "Traceback" not in process.stderr
