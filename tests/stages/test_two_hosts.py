"""SFT, RL and evaluation in two processes of four devices do what one process of eight does, suites on the way too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.compare_workdirs import last_step, read_checkpoint
from composer_jax.checkpoint.weight_chain import WeightReceiver
from composer_jax.observe.metrics import read_metrics
from composer_jax.stages.evaluate import evaluate
from composer_jax.stages.run import Run
from composer_jax.stages.sft import sft
from composer_jax.stages.train_rl import train_rl
from tests.parallel.test_processes import free_port
from tests.stages.base_model import write_base
from tests.stages.two_hosts_config import get_config

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
STAGES = ("sft", "rl")
ALL_STAGES = """
import sys
from composer_jax.rl.workers import worker
from launch import flags, hosts, rl, sft

def main(config, workdir, values):
    from composer_jax.stages.evaluate import evaluate
    from composer_jax.stages.run import Run
    sft.main(config, workdir, values)
    rl.main(config, workdir, values)
    with Run(config, workdir) as run:
        evaluate(run, "after")

play_episode = worker.play_episode
def play(*arguments):
    print("A worker plays an episode.", file=sys.stderr)
    return play_episode(*arguments)
worker.play_episode = play
def options(values):
    sft.options(values)
    rl.define_options(values)
flags.run(main, options=options, processes=hosts.MULTI_PROCESS)
"""
"""What launch.sft, launch.rl and launch.evaluate do, in one process: most of their time is imports and compilation."""


def as_two_processes(base: Path, workdir: Path) -> list[str]:
    """Runs all stages and returns the outputs of the processes."""
    command = [
        *(sys.executable, "-c", ALL_STAGES, f"--config=tests/stages/two_hosts_config.py:{base}"),
        *(f"--workdir={workdir}", f"--config.rl.publish={workdir}.weights", f"--config.stages={STAGES}"),
        *(f"--coordinator=127.0.0.1:{free_port()}", "--processes=2"),
    ]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST")}
    options = dict(cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    started = [subprocess.Popen([*command, f"--process={i}"], **options) for i in range(2)]
    outputs = [process.communicate(timeout=900)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)[-6000:]
    return outputs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of one process of eight devices and of two processes of four."""
    base = tmp_path_factory.mktemp("published") / "model"
    write_base(base)
    folders = {count: tmp_path_factory.mktemp("runs") / f"of{count}" for count in (1, 2)}
    config = get_config(str(base))
    config.stages, config.rl.publish = STAGES, f"{folders[1]}.weights"
    with Run(config, folders[1]) as run:
        sft(run)
        train_rl(run)
        evaluate(run, "after")
    outputs = as_two_processes(base, folders[2])
    played = ["A worker plays an episode." in output for output in outputs]
    assert played == [False, True], "\n".join(outputs)[-6000:]
    return folders


def test_the_runs_train_the_same_tokens_with_the_same_rewards(runs):
    one, two = ((runs[n] / "batches.jsonl").read_text() for n in (1, 2))
    assert one == two
    steps = [json.loads(line) for line in one.splitlines()]
    assert [step["version"] for step in steps] == [0, 1, 2]
    rows = [read_metrics(runs[n] / "metrics" / "rl.jsonl") for n in (1, 2)]
    counts = ("trained_tokens", "staleness_max", "feedback_turns", "feedback_tokens", "sft_replay_tokens")
    for name in ("reward", "turns", "tokens", *counts):
        assert [row[name] for row in rows[0]] == [row[name] for row in rows[1]], name
    assert rows[0][-1]["staleness_max"] == 1
    # A teacher reads every first turn with a hint, in both runs with the same result.
    assert all(row["feedback_turns"] and row["sft_replay_tokens"] for row in rows[0])
    assert all((runs[n] / "data" / "sft_conversations.npz").exists() for n in (1, 2)), "SFT stores what RL replays"
    kl = [[row["feedback_kl"] for row in of_run] for of_run in rows]
    assert kl[1] == pytest.approx(kl[0], rel=1e-3) and min(kl[0]) > 0
    # So does the reference, from which the policy has moved after the first step.
    reference = [[row["kl_reference_k3"] for row in of_run] for of_run in rows]
    assert reference[1] == pytest.approx(reference[0], rel=1e-2, abs=1e-7) and reference[0][-1] > 1e-6


def test_the_runs_end_with_the_same_weights(runs):
    for stage in STAGES:
        folders = [runs[n] / "checkpoints" / stage for n in (1, 2)]
        one, two = (read_checkpoint(folder / str(last_step(folder)))["params"] for folder in folders)
        assert one.keys() == two.keys() and len(one) > 5
        for name, weights in one.items():
            differences = np.abs(two[name] - weights) / np.abs(weights).max()
            # Adam divides a gradient by its own size. An entry whose gradient is nothing but rounding moves by some
            # part of the learning rate, in one way or the other, so a few of thousands may differ by more.
            assert np.sum(differences > 1e-5) <= 1 + weights.size // 1000 and differences.max() < 1e-3, (stage, name)


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
    for stage in STAGES:  # suites while it trains, which both processes play and process 0 reports
        (one,), (two,) = (read_metrics(runs[n] / "metrics" / f"evaluate_{stage}.jsonl") for n in (1, 2))
        assert (two["step"], two["version"], two["lost_bugs"]) == (2, 2, 0)
        assert two["tokens_bugs"] == one["tokens_bugs"] > 0
