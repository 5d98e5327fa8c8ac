"""kill -9 of a process that takes releases through whole cycles: the same versions, weights, batches and checkpoints.

KILLS=20 in the environment kills it that often.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.checkpoint.weight_chain import ChainFiles, WeightReceiver
from composer_jax.observe.metrics import read_metrics
from composer_jax.realtime.batches.store import read_batch
from composer_jax.realtime.release.releases import read_releases
from tests.stages.base_model import write_base
from tests.stages.command_line import finish, kill_when, pipeline_environment
from tests.stages.cycle_process import USERS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("KILLS", 2))


def start(folder: Path, cache: Path) -> subprocess.Popen:
    environment = pipeline_environment() | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    environment.pop("NPROC")
    command = [sys.executable, "-m", "tests.stages.cycle_process", str(folder)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def milestones(folder: Path) -> int:
    """How much of two cycles is on disk."""
    run = folder / "run"
    files = ("batches/*/batch.json", "rl/groups/*", "checkpoints/rl/[0-9]*", "evaluations/*.json")
    found = sum(len(list(run.glob(pattern))) for pattern in files)
    found += len(list(folder.glob("weights/version-*/manifest.json"))) + len(list(folder.glob("traffic/[0-9]")))
    return found + len(read_metrics(run / "metrics" / "rl.jsonl")) + sum(len(r.transitions) for r in read_releases(run))


def outcome(folder: Path) -> dict:
    """What must not depend on kills."""
    receiver, versions = WeightReceiver(str(folder / "weights")), sorted(ChainFiles(str(folder / "weights")).versions())
    weights = {}
    for version in versions:
        receiver.receive(version)
        weights[version] = {name: array.tobytes() for name, array in receiver.arrays.items()}
    with CheckpointStore(folder / "run" / "checkpoints" / "rl") as store:
        arrays, saved = store.restore_to_host(), store.read_json()
    releases = read_releases(folder / "run")
    return {
        "weights": weights,
        "learner": [np.asarray(leaf).tobytes() for tree in arrays.values() for leaf in tree.values()],
        "saved": saved,
        "releases": [(one.anchor, one.version, one.sessions, one.hashes["weights"]) for one in releases],
        "states": [[row["state"] for row in one.transitions] for one in releases],
        "batches": [read_batch(folder / "run", one.number).manifest["sessions"] for one in releases],
        "steps": [row["step"] for row in read_metrics(folder / "run" / "metrics" / "rl.jsonl")],
        "tasks": (folder / "run" / "rl" / "admitted.jsonl").read_text(),
    }


def kill_at(milestone: int, delay: float, folder: Path, cache: Path) -> None:
    """Starts a process that is killed some seconds after so much is on disk."""

    def is_reached() -> bool:
        if reached := milestones(folder) >= milestone:
            time.sleep(delay)
        return reached

    kill_when(start(folder, cache), is_reached)


def complete(folder: Path, cache: Path) -> dict:
    result = finish(start(folder, cache))
    assert result.returncode == 0, result.stderr[-4000:]
    return outcome(folder)


def test_kill_9_anywhere_in_two_cycles_changes_no_bit(tmp_path_factory):
    """Both runs have one path, which is in their configs."""
    cache, folder = tmp_path_factory.mktemp("xla"), tmp_path_factory.mktemp("cycles") / "runs"
    write_base(folder / "model")
    expected = complete(folder, cache)
    assert set(expected["weights"]) == {0, 1, 2} and len(expected["steps"]) > 2
    rows = read_metrics(folder / "run" / "metrics" / "rl.jsonl")
    assert [sum(row["sessions"] for row in rows if row["release"] == number) for number in (1, 2)] == [USERS, USERS]
    first = next(row for row in rows if row["release"] == 1)
    assert abs(first["sampler_kl"]) < 1e-3 and first["trained_tokens"] > 0, (
        "the users' server had the learner's weights"
    )
    last, rng = milestones(folder), random.Random(0)
    shutil.rmtree(folder)
    write_base(folder / "model")
    for i in range(KILLS):
        kill_at(2 + (i * last) // (KILLS + 1) + last // (2 * KILLS), rng.uniform(0, 0.2), folder, cache)
    actual = complete(folder, cache)
    differing = [name for name, value in expected.items() if actual[name] != value]
    assert not differing, json.dumps({name: [str(one[name])[:500] for one in (expected, actual)] for name in differing})
