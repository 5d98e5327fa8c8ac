"""launch.rl, killed with SIGKILL, trains the same batches and ends with the same weights; a suite loses no row.

The run plays two steps ahead. KILLS=20 in the environment kills it that often, STALENESS=0 makes it synchronous, which
tests/rl/test_orchestrator.py has as well, within one process.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.compare_workdirs import last_step, read_checkpoint
from composer_jax.observe.metrics import read_metrics
from tests.models.small import relative_error
from tests.stages.base_model import write_base
from tests.stages.command_line import kill_when

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
KILLS, STALENESS = int(os.environ.get("KILLS", 1)), int(os.environ.get("STALENESS", 2))
STEPS = 6
OF_PROCESS = (
    *("weight_gap", "time", "rollout_s", "sandbox_s", "train_s", "step_s", "compilations"),
    *("groups_queued", "groups_playing"),  # at the end of the update, beside which groups are played
)
"""Columns of metrics/rl.jsonl that depend on the clock or on what was compiled before, and the one that a resumption
measures once more."""
NO_SUITES = "--config.evaluate.during=()"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("published") / "model")


def start(base: Path, workdir: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "launch.rl", f"--config=tests/stages/periodic_config.py:{base}"),
            *(f"--workdir={workdir}", f"--config.rl.steps={STEPS}", f"--config.rl.max_staleness={STALENESS}"),
            *arguments,
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


def kill_after(seconds: float, process: subprocess.Popen, reached: Callable[[], bool]) -> None:
    def later() -> bool:
        if done := reached():
            time.sleep(seconds)
        return done

    kill_when(process, later)


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """The folder of a run without suites that nothing interrupted."""
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    finish(start(base, workdir, NO_SUITES))
    assert not (workdir / "metrics" / "evaluate_rl.jsonl").exists()
    return workdir


def rows(workdir: Path) -> list[dict]:
    return read_metrics(workdir / "metrics" / "rl.jsonl")


def weights(workdir: Path) -> dict[str, np.ndarray]:
    folder = workdir / "checkpoints" / "rl"
    return read_checkpoint(folder / str(last_step(folder)))["params"]


def test_kill_9_changes_neither_batches_nor_weights(base, whole, tmp_path):
    """Killed while it plays and learns, at a random moment of a step after the first."""
    killed, rng = tmp_path / "killed", random.Random(STALENESS)
    save_less = "--config.rl.save_every=2"
    for _ in range(KILLS):
        step = min(len(rows(killed)) + rng.randrange(1, STEPS - 2), STEPS - 1)
        process = start(base, killed, NO_SUITES, save_less)
        kill_after(rng.uniform(0, 0.3), process, lambda step=step: len(rows(killed)) >= step)
    assert not (killed / "stages" / "rl.json").exists()
    finish(start(base, killed, NO_SUITES, save_less))
    assert (killed / "batches.jsonl").read_text() == (whole / "batches.jsonl").read_text()
    expected, actual = weights(whole), weights(killed)
    differences = {name: relative_error(actual[name], expected[name]) for name in expected}
    print(f"largest relative difference of a weight: {max(differences.values()):.1e}")
    # Groups that were cut short play again: the same tokens, with log-probabilities that differ in the last bits.
    assert max(differences.values()) < 1e-5


def test_suites_and_a_kill_inside_one_change_no_bit_and_lose_no_row(base, whole, tmp_path):
    """A suite begins when the checkpoint of its step is there."""
    with_suites = tmp_path / "with"
    checkpoint = with_suites / "checkpoints" / "rl" / "2"
    kill_after(0.2, start(base, with_suites), checkpoint.exists)
    assert read_metrics(with_suites / "metrics" / "evaluate_rl.jsonl") == [], "the suite had ended"
    finish(start(base, with_suites))
    assert (with_suites / "batches.jsonl").read_bytes() == (whole / "batches.jsonl").read_bytes()
    without_clocks = [
        [{name: value for name, value in row.items() if name not in OF_PROCESS} for row in rows(workdir)]
        for workdir in (with_suites, whole)
    ]
    assert without_clocks[0] == without_clocks[1]
    actual = weights(with_suites)
    for name, value in weights(whole).items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)
    suites = read_metrics(with_suites / "metrics" / "evaluate_rl.jsonl")
    assert [(row["step"], row["version"], row["lost_bugs"]) for row in suites] == [(n, n, 0) for n in (2, 4, 6)]
    assert all(0 <= row["low_bugs"] <= row["pass_at_1_bugs"] <= row["high_bugs"] <= 1 for row in suites)
    assert all(row["tokens_bugs"] > 0 and row["seconds_bugs"] > 0 for row in suites)
