"""launch.tasks: what its commands print, and their exit codes."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from composer_jax.tasks.harbor import write_task
from composer_jax.tasks.task import Task
from launch import hosts, tasks
from tests.demo.generate import generate
from tests.launch.in_process import run_here

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(capsys):
    return functools.partial(run_here, capsys, tasks, arguments="COMMAND [PATH]", processes=hosts.NO_DEVICES)


@pytest.fixture
def folder(tmp_path):
    for index in range(2):
        task = generate("bugfix", "train", 0, index)
        write_task(task, tmp_path / task.id)
    return tmp_path


def test_validate_reports_invalid_tasks(folder, run):
    code, out, err = run("validate", folder, "--runs=2")
    assert (code, "2 of 2 tasks are valid in 2 runs" in out) == (0, True), err
    assert "validate: 2/2 tasks" in err

    task = generate("bugfix", "train", 0, 2)
    wrong = {"bugs": [{**bug, "new": bug["old"]} for bug in task.metadata["bugs"]]}
    write_task(Task.from_json({**task.to_json(), "metadata": wrong}), folder / "wrong")
    code, out, _ = run("validate", "--runs=1", folder)
    assert code == 1
    assert f"{task.id}: wrong; gold scores 0" in out and "2 of 3 tasks are valid" in out
    report = json.loads((folder / "validation.json").read_text())
    assert [entry["verdict"] for entry in report] == ["valid", "valid", "wrong"]


def harbor_task(folder, environment):
    files = {
        "task.toml": f'version = "1.0"\n[environment]\n{environment}\n',
        "instruction.md": "Write 42 into answer.txt.\n",
        "environment/Dockerfile": "FROM python:3.12-slim\nWORKDIR /app\n",
        "tests/test.sh": "[ -e /app/answer.txt ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "echo 42 > /app/answer.txt\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_validate_names_tasks_that_need_the_network_and_those_that_cannot_be_used(tmp_path, run, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, environment in {"a": "", "b": "", "c": "gpus = 2"}.items():
        harbor_task(tmp_path / "tasks" / name, environment)
    code, _, err = run("validate", tmp_path / "tasks", "--runs=1")
    assert code == 2 and "2 tasks need the network" in err and ": a, b; --network=host gives" in err
    assert not (tmp_path / "tasks" / "validation.json").exists()
    code, out, err = run("validate", tmp_path / "tasks", "--runs=1", "--network=host")
    assert code == 1 and "2 of 3 tasks are valid in 1 runs" in out, err
    assert "left out: the task in" in out and "GPUs ([environment] gpus = 2)" in out


def test_show_and_help(folder, run):
    task = generate("bugfix", "train", 0, 1)
    assert task.id in run("show", folder)[1]
    assert task.instruction in run("show", folder / task.id)[1]
    assert "--kinds: generate: kinds of breakage" in run("--help")[1]


@pytest.mark.parametrize("name", ["tasks", "convert"])
def test_the_command_says_how_it_is_used(name):
    command = [sys.executable, "-m", f"launch.{name}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and f"python -m launch.{name}" in done.stdout, done.stderr


BAD = {
    "": "a command is missing",
    "make": "'make' is not a command; use generate, validate, show",
    "validate": "validate takes one path",
    "generate here": "generate takes no path",
    "validate nowhere": "nowhere does not exist",
    "generate --repo=.": "generate needs --out",
    "generate --repo=. --out=nowhere/out": "the tests need pytest",
    "generate --repo=. --out=nowhere/out --packages=x --kinds=typo": "'typo' is not a kind of task",
}


@pytest.mark.parametrize(("words", "sentence"), BAD.items())
def test_bad_command_lines_end_with_a_sentence(run, words, sentence):
    code, _, err = run(*words.split())
    assert code == 2 and sentence in err
