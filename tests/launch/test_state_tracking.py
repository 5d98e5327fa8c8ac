"""launch.state_tracking as a user runs it: what a real sampler writes, its score, and one sentence for bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.evals.state_tracking import encode_tasks, read_tasks
from launch import state_tracking
from tests.data.prepare.folders import make_repository
from tests.evals.test_state_tracking import levenshtein
from tests.launch.in_process import run_here
from tests.parallel.test_processes import free_port
from tests.stages.small_model import CONFIG, greedy_tokens, write_model

ROOT = Path(__file__).parents[2]
FILES = [{name: f"{name[0]} = {k}\nb = {k + 1}\n" for name in ("a.py", "c.py", "d.py")} for k in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("state") / "hf")


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    path = tmp_path_factory.mktemp("repository")
    long = [{"long.py": f"x = {k}\n" * 200} for k in range(2)]
    return make_repository(path, *((str(k), FILES[k] | long[k]) for k in range(2)))


def test_a_model_writes_greedily_and_is_scored_beside_a_copy(folder, repository, tmp_path, capsys):
    out = tmp_path / "results.jsonl"
    arguments = [f"--checkpoint=hf:{folder}", f"--repository={repository}", f"--out={out}", "--dtype=float32"]
    code, stdout, stderr = run_here(capsys, state_tracking, *arguments, "--diffs=1", "--slots=2")
    assert code == 0, stderr
    summary = json.loads(stdout.splitlines()[-1])
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert summary["tasks"] == len(results) == 3 and summary["skipped"] == {"too long": 1} and summary["diffs"] == 1

    text = open_checkpoint(f"hf:{folder}").text
    encoded, _ = encode_tasks(read_tasks(repository, 1), text.tokenizer, 9, CONFIG.max_context)
    distances = []
    for result, one in zip(results, encoded, strict=True):
        tokens = greedy_tokens(one.prompt, one.max_tokens, text.end_tokens)
        assert result["path"] == one.task.path and result["sampled_tokens"] == len(tokens)
        assert result["written"] == one.task.read_answer(text.decode(tokens))
        distances.append(levenshtein(result["written"], one.task.last))
        assert result["distance"] == distances[-1] and result["copy_distance"] == 2
    assert summary["distance"] == sum(distances) / 3 and summary["copy_distance"] == 2


@pytest.mark.slow
def test_two_processes_print_once_what_one_does(folder, repository, capsys):
    arguments = [f"--checkpoint=hf:{folder}", f"--repository={repository}", "--diffs=1", "--dtype=float32"]
    code, alone, stderr = run_here(capsys, state_tracking, *arguments)
    assert code == 0, stderr
    port, started = free_port(), []
    for process in range(2):
        command = [sys.executable, "-m", "launch.state_tracking", *arguments, "--tensor=2"]
        command += [f"--coordinator=127.0.0.1:{port}", "--processes=2", f"--process={process}"]
        started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    (first, first_error), (second, second_error) = (process.communicate(timeout=300) for process in started)
    assert [process.returncode for process in started] == [0, 0], first_error + second_error
    assert "tasks" not in second and json.loads(first.splitlines()[-1]) == json.loads(alone.splitlines()[-1])


BAD = {
    "--repository is missing": ["--checkpoint={0}"],
    "there is no folder": ["--checkpoint=hf:{2}/none", "--repository={1}"],
    "{2} is not a git repository": ["--checkpoint={0}", "--repository={2}"],
    "has 5 changes, the most is 1; use fewer": ["--checkpoint={0}", "--repository={1}"],
    "no file makes a task that fits into 30 tokens (4 too long)": [
        "--checkpoint={0}",
        "--repository={1}",
        "--diffs=1",
        "--max_context=30",
    ],
    "--max_context=641 exceeds the model's context of 640": [
        "--checkpoint={0}",
        "--repository={1}",
        "--max_context=641",
    ],
    "--out=gs://b/x is a URL": ["--checkpoint={0}", "--repository={1}", "--out=gs://b/x"],
    "--diffs": ["--checkpoint={0}", "--repository={1}", "--diffs=0"],
}


@pytest.mark.parametrize(("sentence", "arguments"), BAD.items(), ids=BAD)
def test_bad_input_ends_with_a_sentence_before_weights_are_read(
    folder, repository, tmp_path, capsys, monkeypatch, sentence, arguments
):
    monkeypatch.setattr("composer_jax.checkpoint.checkpoint.load_hf", None)
    places = folder, repository, tmp_path
    code, out, err = run_here(capsys, state_tracking, *(argument.format(*places) for argument in arguments))
    assert code == 2 and out == "" and sentence.format(*places) in err
    assert "Traceback" not in err and len(err.strip().splitlines()) <= 2


def test_a_missing_package_is_named(folder, repository, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidfuzz.distance", None)
    code, _, err = run_here(capsys, state_tracking, f"--checkpoint={folder}", f"--repository={repository}")
    assert code == 2 and "edit distances need rapidfuzz; pip install 'composer_jax[evals]'" in err
