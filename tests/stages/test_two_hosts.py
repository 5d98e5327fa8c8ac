"""launch.rl and launch.evaluate as two processes of four devices do what one process of eight does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.compare_workdirs import last_step, read_checkpoint
from composer_jax.checkpoint.weight_chain import WeightReceiver
from tests.parallel.test_processes import free_port
from tests.stages.base_model import write_base

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SAYING_WHO_PLAYS = """
import runpy, sys
from composer_jax.rl.workers import worker
play_episode = worker.play_episode
def play(*arguments):
    print("A worker plays an episode.", file=sys.stderr)
    return play_episode(*arguments)
worker.play_episode = play
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def launch(stage: str, base: Path, workdir: Path, processes: int, *arguments: str) -> list[str]:
    """Runs an entry point as so many processes and returns their outputs."""
    coordinator = f"--coordinator=127.0.0.1:{free_port()}"
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST")}
    command = [
        *(
            sys.executable,
            "-c",
            SAYING_WHO_PLAYS,
            f"launch.{stage}",
            f"--config=tests/stages/two_hosts_config.py:{base}",
        ),
        *(f"--workdir={workdir}", *arguments),
    ]
    started = [
        subprocess.Popen(
            [*command, *([coordinator, f"--processes={processes}", f"--process={i}"] if processes > 1 else [])],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(processes)
    ]
    outputs = [process.communicate(timeout=900)[0] for process in started]
    assert [process.returncode for process in started] == [0] * processes, "\n".join(outputs)[-6000:]
    return outputs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of one process of eight devices and of two processes of four."""
    base = tmp_path_factory.mktemp("published") / "model"
    write_base(base)
    folders, outputs = {}, []
    for processes in (1, 2):
        folders[processes] = tmp_path_factory.mktemp("runs") / f"of{processes}"
        outputs += launch(
            "rl", base, folders[processes], processes, f"--config.rl.publish={folders[processes]}.weights"
        )
        outputs += launch(
            "evaluate", base, folders[processes], processes, f"--config.rl.publish={folders[processes]}.weights"
        )
    played = ["A worker plays an episode." in output for output in outputs]
    # RL and evaluation of one process, then of two.
    assert played == [False, False, False, True, False, True], "\n".join(outputs)[-6000:]
    return folders


def test_the_runs_train_the_same_tokens_with_the_same_rewards(runs):
    one, two = ((runs[n] / "batches.jsonl").read_text() for n in (1, 2))
    assert one == two
    steps = [json.loads(line) for line in one.splitlines()]
    assert [step["version"] for step in steps] == [0, 1, 2]
    rows = [[json.loads(line) for line in (runs[n] / "metrics" / "rl.jsonl").read_text().splitlines()] for n in (1, 2)]
    for name in ("reward", "turns", "tokens", "trained_tokens", "staleness_max", "feedback_turns", "feedback_tokens"):
        assert [row[name] for row in rows[0]] == [row[name] for row in rows[1]], name
    assert rows[0][-1]["staleness_max"] == 1
    # A teacher reads every first turn with a hint, in both runs with the same result.
    assert all(row["feedback_turns"] for row in rows[0])
    kl = [[row["feedback_kl"] for row in of_run] for of_run in rows]
    assert kl[1] == pytest.approx(kl[0], rel=1e-3) and min(kl[0]) > 0
    # So does the reference, from which the policy has moved after the first step.
    reference = [[row["kl_reference_k3"] for row in of_run] for of_run in rows]
    assert reference[1] == pytest.approx(reference[0], rel=1e-2, abs=1e-7) and reference[0][-1] > 1e-6


def test_the_runs_end_with_the_same_weights(runs):
    folders = [runs[n] / "checkpoints" / "rl" for n in (1, 2)]
    one, two = (read_checkpoint(folder / str(last_step(folder)))["params"] for folder in folders)
    assert one.keys() == two.keys() and len(one) > 5
    for name, weights in one.items():
        differences = np.abs(two[name] - weights) / np.abs(weights).max()
        # Adam divides a gradient by its own size. An entry whose gradient is nothing but rounding moves by some part of
        # the learning rate, in one way or the other, so a few of thousands may differ by more.
        assert np.sum(differences > 1e-5) <= 1 + weights.size // 1000 and differences.max() < 1e-3, name


def test_both_publish_every_version_and_measure_the_same(runs):
    for version in range(4):
        received = []
        for n in (1, 2):
            receiver = WeightReceiver(f"{runs[n]}.weights")
            receiver.receive(version)
            received.append(receiver.arrays)
        assert received[0].keys() == received[1].keys()
    results = [json.loads((runs[n] / "stages" / "evaluate_after.json").read_text())["suites"] for n in (1, 2)]
    assert results[0]["bugs"]["outcomes"] == results[1]["bugs"]["outcomes"]
    assert results[0]["bugs"]["sampled_tokens"] == results[1]["bugs"]["sampled_tokens"]
