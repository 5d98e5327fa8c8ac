"""Suites while RL and SFT train, with a real network, engine and sandboxes: training keeps its bits, no row is lost.

tests/stages/test_train_rl.py has the RL stage with simulated roles, tests/train/test_loop.py the hook of SFT.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

from benchmarks.compare_workdirs import last_step, read_checkpoint
from composer_jax.observe.metrics import read_metrics
from composer_jax.stages.periodic_evaluation import PeriodicEvaluation
from composer_jax.stages.run import Run
from composer_jax.stages.sft import sft
from configs import smollm2_135m
from tests.parallel.test_processes import free_port
from tests.stages.base_model import write_base

pytestmark = pytest.mark.slow
OF_PROCESS = ("weight_gap", "time", "rollout_s", "sandbox_s", "train_s", "step_s", "compilations")
"""Columns of metrics/rl.jsonl that depend on the clock or on what was compiled before, and the one that a resumption
measures once more."""
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published") / "model"
    write_base(folder)
    return folder


def start(base: Path, workdir: Path, *arguments: str, entry: str = "launch.rl") -> subprocess.Popen:
    """Starts a stage with suites."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", entry, f"--config=tests/stages/periodic_config.py:{base}"),
            *(f"--workdir={workdir}", *arguments),
        ],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen) -> None:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-4000:]


def kill_inside_the_suite_of(step: int, process: subprocess.Popen, workdir: Path) -> None:
    """Kills a process while the suite plays, which begins when the checkpoint of its step is there."""
    while not (workdir / "checkpoints" / "rl" / f"{step}").exists():
        assert process.poll() is None, process.communicate()[0][-4000:]
        time.sleep(0.02)
    time.sleep(0.5)
    process.kill()
    process.communicate(timeout=60)
    assert read_metrics(workdir / "metrics" / "evaluate_rl.jsonl") == [], "the suite had ended"


def weights(workdir: Path, stage: str) -> dict[str, np.ndarray]:
    folder = workdir / "checkpoints" / stage
    return read_checkpoint(folder / str(last_step(folder)))["params"]


def without_clocks(workdir: Path) -> list[dict]:
    rows = read_metrics(workdir / "metrics" / "rl.jsonl")
    return [{name: value for name, value in row.items() if name not in OF_PROCESS} for row in rows]


def test_a_deterministic_run_keeps_its_bits_and_a_kill_inside_a_suite_loses_no_row(base, tmp_path):
    without, with_suites = tmp_path / "without", tmp_path / "with"
    finish(start(base, without, "--config.evaluate.during=()"))
    kill_inside_the_suite_of(2, start(base, with_suites), with_suites)
    finish(start(base, with_suites))
    assert (with_suites / "batches.jsonl").read_bytes() == (without / "batches.jsonl").read_bytes()
    assert without_clocks(with_suites) == without_clocks(without)
    expected, actual = weights(without, "rl"), weights(with_suites, "rl")
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)
    rows = read_metrics(with_suites / "metrics" / "evaluate_rl.jsonl")
    assert [(row["step"], row["version"], row["lost_bugs"]) for row in rows] == [(2, 2, 0), (4, 4, 0)]
    assert all(0 <= row["low_bugs"] <= row["pass_at_1_bugs"] <= row["high_bugs"] <= 1 for row in rows)
    assert all(row["tokens_bugs"] > 0 and row["seconds_bugs"] > 0 for row in rows)
    assert not (without / "metrics" / "evaluate_rl.jsonl").exists()


def sft_config(base: Path, **evaluate) -> ConfigDict:
    config = smollm2_135m.get_config("smoke")
    config.base, config.stages = f"hf:{base}", ("sft",)
    config.agent.limits.update({"max_turns": 2, "max_turn_tokens": 16, "max_episode_tokens": 8192})
    config.sft.update({"seq_len": 4096, "batch_size": 2, "steps": 5, "save_every": 5})
    config.sampler.update({"slots": 4, "max_model_len": 4096, "prefill_shapes": ((4, 512),)})
    config.rl.batches = ((4096, 1),)
    config.evaluate.update(evaluate)
    return config


def test_sft_keeps_its_bits_and_goes_on_with_the_suite_that_was_cut_short(base, tmp_path, monkeypatch):
    workdirs = {name: tmp_path / name for name in ("without", "with")}
    with Run(sft_config(base), workdirs["without"]) as run:
        sft(run)

    async def fail(*_, **__):
        raise RuntimeError("the machine is gone")

    config = sft_config(base, every={"bugs": 2})
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the machine is gone"):
        patch.setattr(PeriodicEvaluation, "play", fail)
        with Run(config, workdirs["with"]) as run:
            sft(run)
    with Run(config, workdirs["with"]) as run:
        sft(run)
        assert run.services.sampler.version == -1, "the sampler holds no weights between its suites"
    rows = read_metrics(workdirs["with"] / "metrics" / "evaluate_sft.jsonl")
    assert [(row["step"], row["version"]) for row in rows] == [(2, 2), (4, 4)]
    assert all(row["tokens_bugs"] > 0 and row["lost_bugs"] == 0 for row in rows)
    losses = [
        [(row["step"], row["loss"], row["grad_norm"]) for row in read_metrics(folder / "metrics" / "sft.jsonl")]
        for folder in workdirs.values()
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 5
    expected, actual = (weights(folder, "sft") for folder in workdirs.values())
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


def test_two_processes_play_the_suites_of_sft_and_rl(base, tmp_path):
    """Both processes compute and play; process 0 writes the rows."""
    sizes = (
        "--config.mesh.cpu_devices=2",
        "--config.mesh.data=2",
        "--config.evaluate.suites.bugs.tasks=2",
        "--config.rl.steps=2",
    )
    for stage in ("sft", "rl"):
        workdir, coordinator = tmp_path / stage, f"--coordinator=127.0.0.1:{free_port()}"
        two = [
            start(
                base,
                workdir,
                *(f"--config.stages=('{stage}',)", *sizes),
                *(coordinator, "--processes=2", f"--process={i}"),
                entry=f"launch.{stage}",
            )
            for i in range(2)
        ]
        for process in two:
            finish(process)
        (row,) = read_metrics(workdir / "metrics" / f"evaluate_{stage}.jsonl")
        assert (row["step"], row["version"], row["lost_bugs"]) == (2, 2, 0) and row["tokens_bugs"] > 0
