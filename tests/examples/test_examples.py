"""The scripts of examples/ run and print what their docstrings say."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from composer_jax.observe.episodes import write_episodes
from composer_jax.schema.run_config import run_config
from composer_jax.tasks.harbor import read_task
from examples import add_tool, own_repository, read_episodes, sample_weights, task_family
from tests.stages.command_line import pipeline_environment

ROOT = Path(__file__).parents[2]

EPISODE = {
    "task_id": "t0",
    "family": "bugfix",
    "split": "train",
    "seed": 7,
    "reward": 0.0,
    "outcome": "no_call",
    "turns": 1,
    "summaries": 0,
    "condition": "default",
    "step": None,
    "tokens": 5,
    "sampled_tokens": 3,
    "summary_tokens": 0,
    "parts": {"detail": "0 of 2 hidden cases pass"},
    "instruction": "Fix it.",
    "segments": [
        [
            {"kind": "prompt", "text": "Fix it.", "tokens": 2, "sampled": False, "version": None, "calls": []},
            {
                "kind": "assistant",
                "text": "",
                "tokens": 3,
                "sampled": True,
                "version": 0,
                "calls": [{"name": "read", "arguments": {"path": "a.py"}, "error": None}],
            },
        ]
    ],
}


def test_read_episodes(tmp_path, capsys):
    path = write_episodes(tmp_path / "after.jsonl", [EPISODE, EPISODE | {"reward": 1.0, "outcome": "finished"}])
    read_episodes.main(str(path))
    shown = capsys.readouterr().out
    assert "bugfix: 1 of 2 solved; 1 no_call, 1 finished; 0.0 summaries each" in shown
    assert "t0, seed 7: 0 of 2 hidden cases pass" in shown
    assert "[assistant, 3 tokens]  read({'path': 'a.py'})" in shown


def test_sample_weights_is_fixed_by_the_seed(tmp_path):
    sample_weights.write_small_model(tmp_path / "model")
    sample = lambda seed: sample_weights.answer(tmp_path / "model", "Add.", 12, seed)  # noqa: E731
    first = sample(0)
    assert first and first == sample(0) and first != sample(1)


def test_add_tool(capsys):
    episode = asyncio.run(add_tool.play())
    assert episode.reward == 1.0
    assert capsys.readouterr().out.splitlines() == ["3 lines", "ok", "finished, reward 1.0"]


def test_task_family():
    family = task_family.Offset()
    assert family.generate("train", 0, 1) == family.generate("train", 0, 1) != family.generate("train", 0, 2)
    assert asyncio.run(task_family.grades(family.generate("heldout", 3, 5))) == (0.0, 1.0)
    config = run_config(task_family.get_config())
    assert config.rl.groups == {"offset": 2} and config.evaluate.suites["offset"].family == "offset"


def test_own_repository_makes_tasks(tmp_path, packages):
    repository = own_repository.make_repository(tmp_path / "repository")
    out = own_repository.make_tasks(repository, tmp_path / "tasks", packages)
    tasks = [read_task(folder) for folder in (out / "tasks").iterdir()]
    assert len(tasks) == own_repository.STEPS and {task.family for task in tasks} == {"repository"}
    assert run_config(own_repository.get_config(out)).rl.groups == {"repository": 1}


@pytest.mark.slow
def test_own_repository_trains(tmp_path, packages):
    command = [sys.executable, "-m", "examples.own_repository", "", str(tmp_path), str(packages)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=pipeline_environment())
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0].startswith("2 tasks from ") and lines[-1].startswith("step 2: reward ")
