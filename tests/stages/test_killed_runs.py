"""launch.rl, killed with SIGKILL while it plays and learns, trains the same batches and ends with the same weights.

The run plays two steps ahead. KILLS=20 in the environment kills it that often, STALENESS=0 makes it synchronous, which
tests/rl/test_orchestrator.py has as well, within one process.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.compare_workdirs import last_step, read_checkpoint
from tests.models.small import relative_error
from tests.stages.base_model import write_base

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
KILLS, STALENESS = int(os.environ.get("KILLS", 1)), int(os.environ.get("STALENESS", 2))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published") / "model"
    write_base(folder)
    return folder


def start(base: Path, workdir: Path) -> subprocess.Popen:
    one_device = [f"--config.mesh.{axis}=1" for axis in ("cpu_devices", "data", "expert")]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "launch.rl", f"--config=tests/stages/two_hosts_config.py:{base}"),
            *(f"--workdir={workdir}", "--config.rl.steps=8", "--config.rl.save_every=3", *one_device),
            f"--config.rl.max_staleness={STALENESS}",
        ],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(base: Path, workdir: Path) -> float:
    """Runs to the end; returns the seconds from the first admitted group on."""
    began = time.monotonic()
    process = start(base, workdir)
    while not (workdir / "rl" / "admitted.jsonl").exists() and process.poll() is None:
        began = time.monotonic()
        time.sleep(0.01)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-4000:]
    return time.monotonic() - began


def kill(base: Path, workdir: Path, after_s: float) -> None:
    """Starts the run and kills it so many seconds after it has begun to play, or later if that is soon."""
    process = start(base, workdir)
    journal = workdir / "rl" / "admitted.jsonl"
    size = journal.stat().st_size if journal.exists() else 0
    deadline = None
    while process.poll() is None and (deadline is None or time.monotonic() < deadline):
        if deadline is None and journal.exists() and journal.stat().st_size > size:
            deadline = time.monotonic() + after_s
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)


def last_weights(workdir: Path) -> dict:
    folder = workdir / "checkpoints" / "rl"
    return read_checkpoint(folder / str(last_step(folder)))["params"]


def test_kill_9_changes_neither_batches_nor_weights(base, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    seconds = finish(base, whole)
    rng = random.Random(STALENESS)
    for _ in range(KILLS):
        kill(base, killed, rng.uniform(0, seconds / 2))
        if (killed / "stages" / "rl.json").exists():
            break
    finish(base, killed)
    assert (killed / "batches.jsonl").read_text() == (whole / "batches.jsonl").read_text()
    expected, actual = last_weights(whole), last_weights(killed)
    differences = {name: relative_error(actual[name], expected[name]) for name in expected}
    print(f"largest relative difference of a weight: {max(differences.values()):.1e}")
    # Groups that were cut short play again: the same tokens, with log-probabilities that differ in the last bits.
    assert max(differences.values()) < 1e-5
