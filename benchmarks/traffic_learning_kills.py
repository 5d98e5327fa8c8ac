"""Two cycles of simulated users are killed with SIGKILL: are sessions, versions and weights the same?

    python -m benchmarks.traffic_learning_kills [FOLDER]

`launch.traffic simulate` plays two cycles of tiny:traffic_smoke without a disturbance, and then again in the same
folder, where it is killed at KILLS points, spread evenly over what it writes. The base is trained once. Prints one JSON
object: {"kills", "lost": versions that are missing or have another bit, "problems": what else differs}.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.seeded_runs import run_pipeline
from composer_jax.checkpoint.weight_chain import ChainFiles, WeightReceiver
from composer_jax.observe.journal import read_journal
from composer_jax.observe.metrics import read_metrics
from composer_jax.realtime.batches.store import read_batch
from composer_jax.realtime.release.releases import read_releases

KILLS, CYCLES, SESSIONS = 20, 2, 12
CONFIG = "configs/tiny.py:traffic_smoke"
POLL_S = 0.05
FILES = (
    "batches/*/batch.json",
    "rl/groups/*",
    "checkpoints/rl/[0-9]*",
    "evaluations/*.json",
    "weights/version-*/manifest.json",
)
"""What a cycle writes beside sessions, minibatches and transitions."""


def measure_kills(folder: Path, kills: int = KILLS) -> dict[str, Any]:
    """Returns the printed object. folder: of the base and of the runs; a base that is there is used."""
    base, run = folder.absolute() / "base", folder.absolute() / "run"
    if not (base / "stages" / "sft.json").exists():
        run_pipeline(base, "traffic_smoke", 0, stages="('pretrain','sft')", evaluate__which="('before',)")
    shutil.rmtree(run, ignore_errors=True)  # one folder for both: its path is in the config
    _finish(_start(run, base))
    expected, last = outcome(run), milestones(run)
    shutil.rmtree(run)
    rng, done = random.Random(0), 0
    for i in range(kills):
        done += _kill(_start(run, base), run, 1 + i * last // kills, rng.uniform(0, 0.5))
    _finish(_start(run, base))
    return {"kills": done, **compare(expected, outcome(run))}


def compare(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {"lost", "problems"} of two outcomes."""
    versions = {*expected["weights"], *actual["weights"]}
    lost = sum(expected["weights"].get(one) != actual["weights"].get(one) for one in versions)
    others = [name for name, value in expected.items() if name != "weights" and actual[name] != value]
    return {"lost": lost, "problems": others}


def milestones(run: Path) -> int:
    """Returns how much of the cycles is on disk."""
    if not run.exists():
        return 0
    rows = read_metrics(path) if (path := run / "metrics" / "rl.jsonl").exists() else []
    sessions = sum(len(read_journal(file)) for file in run.glob("users/[0-9]*.jsonl"))
    files = sum(len(list(run.glob(pattern))) for pattern in FILES)
    return files + sessions + len(rows) + sum(len(one.transitions) for one in read_releases(run))


def outcome(run: Path) -> dict[str, Any]:
    """Returns what must not depend on kills.

    Sessions that were cut short have other ids, and a release's salt is drawn anew in each run, so ids and the sessions
    of canaries are left out.
    """
    chain = str(run / "weights")
    receiver, weights = WeightReceiver(chain), {}
    for version in sorted(ChainFiles(chain).versions()):
        receiver.receive(version)
        weights[version] = {str(name): array.tobytes() for name, array in receiver.arrays.items()}
    releases = read_releases(run)
    truths = {
        (file.stem, row["number"]): row["truth"]
        for file in run.glob("users/[0-9]*.jsonl")
        for row in read_journal(file)
        if row["number"] < SESSIONS
    }
    batches = [read_batch(run, one.number).manifest["sessions"] for one in releases]
    return {
        "weights": weights,
        "truths": truths,
        "releases": [(one.anchor, one.version, len(one.sessions), one.state) for one in releases],
        "states": [[row["state"] for row in one.transitions] for one in releases],
        "advantages": [sorted(turn["advantage"] for row in rows for turn in row["turns"]) for rows in batches],
        "steps": [row["step"] for row in read_metrics(run / "metrics" / "rl.jsonl")],
    }


def _start(run: Path, base: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "launch.traffic", "simulate", f"--config={CONFIG}", f"--workdir={run}"]
    command += [f"--cycles={CYCLES}", f"--sessions={SESSIONS}"]
    command += ["--config.stages=('rl',)", f"--config.base={base / 'checkpoints' / 'sft'}"]
    # What is sampled together may change each other's last bits, and which sessions are together is a matter of time.
    command += ["--config.agent.concurrency=1"]
    return subprocess.Popen(
        command, cwd=Path(__file__).parents[1], stdout=subprocess.DEVNULL, stderr=sys.stderr, start_new_session=True
    )


def _finish(process: subprocess.Popen) -> None:
    if code := process.wait():
        raise SystemExit(code)  # the child has printed the reason


def _kill(process: subprocess.Popen, run: Path, milestone: int, delay: float) -> bool:
    """Kills a process and its children some seconds after so much is on disk; returns whether it was still at work."""
    while process.poll() is None and milestones(run) < milestone:
        time.sleep(POLL_S)
    time.sleep(delay)
    was_running = process.poll() is None
    if was_running:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return was_running


if __name__ == "__main__":
    print(json.dumps(measure_kills(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/traffic_learning_kills"))))
