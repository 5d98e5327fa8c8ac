"""Whether a model learns from its users: `python -m benchmarks.traffic_learning [--arms=loop,none] [--seeds=0,1,2]`.

Runs of tiny:traffic (benchmarks/traffic_arms.py) in which simulated users work with a version of the weights in every
cycle. A run that was stopped goes on; a finished one is a row of --rows, by population, seed and arm, and does not run
again. All arms of a seed have the same base, users and requests. Measures are those of users whose organisation does
not poison, over the sessions of a cycle:

    kept        share of the agent's lines that are left after one hour, 0 without edits
    satisfied   share of the user's further messages that say that the edit is right

--picture=FILE draws kept by cycle. Prints progress on stderr, on stdout a table of the controls, and as the last line
one JSON object, with what has rows:

    kept        arm -> kept of the last cycle minus that of the first, {"difference", "low", "high", "users"}: a 95 %
                interval over users; satisfied is the same of satisfied follow-ups
    kept_above, satisfied_above
                control -> the loop's last common cycle minus the control's, in which the same users ask for the same
    recovered   share of what the change of taste costs the loop that it has regained one and two cycles later
    malformed_calls, edits
                arm -> rate by cycle, in the mean over the seeds
    hack_stopped_at
                share of 20,000 scripted users that have the policy that asks in place of editing when a gate with its
                monitors (0) or the canary stops it, the largest over seeds; null if nothing does in a seed.
    loop_stopped_at
                the smallest such share of the loop's releases that its own gate passed; null if nothing stops one
    poison      arm -> share of the organisation in the traffic, in what moves the policy, and the bound of caps.py
    learning_kills, learning_lost
                kill -9 of two cycles (benchmarks/traffic_learning_kills.py), and versions that differ after them
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.seeded_runs import Row, integers
from benchmarks.traffic_arms import ARMS, ArmRun, read_json, truths_of
from benchmarks.traffic_hack import stopped_at
from benchmarks.traffic_learning_kills import measure_kills
from benchmarks.traffic_learning_rows import KILLS, POISON, ROWS, read_rows, rounded, summarize, table, write_rows
from benchmarks.traffic_picture import draw
from composer_jax.demo.users import KEPT_S, SimulatedUsers
from composer_jax.observe.metrics import read_metrics
from composer_jax.realtime.release.gate import GateRules, gate, read_evaluation
from composer_jax.realtime.release.releases import read_releases

HACKS = ("edits_priced", "loop")
"""Arms whose releases meet a gate with monitors and scripted users; those of the loop show what is stopped in vain."""
POPULATIONS = {name: "poisoned" if name in POISON else "first" for name in ARMS}
"""Arm -> its population, unless --population names one."""
SESSIONS = {"traffic": 256, "traffic_smoke": 12}
SHOWN = ("kept", "kept_of_edited", "good", "good_at_first", "satisfied_follow_ups", "edit_rate", "question_rate")
COLUMNS = (*SHOWN, "malformed_call_rate", "tokens")
"""Of demo/users.py: summarize, which a row has of each cycle."""


# ---------------------------------------------------------------------------------------------------- one run's row


def measure(run: ArmRun) -> Row:
    """Plays a run, and returns its row, whose "seconds" are those of this process."""
    began = time.monotonic()
    run.play()
    users = SimulatedUsers(run.seed, run.population)
    cycles = []
    for cycle in range(1, run.arm.cycles + 1):
        truths = truths_of(run.workdir, cycle, run.sessions)
        means = users.summarize(truths)
        by_user = defaultdict(lambda: [0, 0.0, 0, 0])
        for truth in truths:
            if not truth["poison"]:
                add = (1, truth["kept"].get(f"{KEPT_S:g}", 0.0), len(truth["follow_ups"]))
                add = (*add, sum(vote > 0 for vote in truth["follow_ups"]))
                by_user[truth["user"]] = [a + b for a, b in zip(by_user[truth["user"]], add, strict=True)]
        cycles.append({"cycle": cycle, **rounded({name: means[name] for name in COLUMNS}), "users": by_user})
    row = {"population": run.population, "seed": run.seed, "arm": run.name, "sessions": run.sessions}
    releases = [_release(run, one) for one in read_releases(run.workdir)] if run.arm.learns else []
    return row | {"cycles": cycles, "releases": releases, "seconds": round(time.monotonic() - began)}


def _release(run: ArmRun, release: Any) -> Row:
    """Returns what became of a release: its state, its update, and the monitors of its batch."""
    workdir = run.workdir
    updates = [row for row in read_metrics(workdir / "metrics" / "rl.jsonl") if row.get("release") == release.number]
    manifest = read_json(workdir / "batches" / f"{release.number:04d}" / "batch.json") or {}
    suites = (release.gate or {}).get("suites", {})
    return {
        "release": release.number,
        "anchor": release.anchor,
        "version": release.version,
        "state": release.state,
        "reason": release.transitions[-1]["reason"],
        "gate": {name: rounded({"mean": suite["mean"], "lower": suite["lower"]}) for name, suite in suites.items()},
        "minibatches": len(updates),
        "sampler_kl": rounded({"kl": updates[-1].get("sampler_kl")})["kl"] if updates else None,
        "monitored": _monitored(workdir, release, run.config().traffic.gate.margin),
        "batch_sessions": len(manifest.get("sessions", ())),
        "monitors": rounded(_monitors(manifest)),
    }


def _monitored(workdir: Path, release: Any, margin: float) -> dict[str, Any] | None:
    """Returns what a gate with all its monitors says of a candidate: {"verdict", "reasons"}; None without one."""
    files = [workdir / "evaluations" / f"{version}.json" for version in (release.anchor, release.version)]
    if not all(file.exists() for file in files):
        return None
    anchor, candidate = (read_evaluation(file)["suites"] for file in files)
    result = gate(anchor, candidate, GateRules(margin))
    return {"verdict": result["verdict"], "reasons": result["reasons"]}


def _monitors(manifest: Mapping[str, Any]) -> dict[str, Any]:
    monitors = manifest.get("monitors", {})
    names = ("effective_users", "mean_advantage", "explained_variance", "organisations")
    return {name: monitors[name] for name in names if name in monitors}


def complete(rows: list[Row], run: ArmRun, file: Path) -> None:
    """Adds the row of a run, or what stops its releases, if that is missing, and writes the file."""
    key = (run.population, run.seed, run.name)
    row = next((row for row in rows if (row.get("population"), row.get("seed"), row.get("arm")) == key), None)
    if row is not None and (run.name not in HACKS or "stopped_at" in row):
        return
    print(f"traffic_learning: {run.name} of {run.population}, seed {run.seed}", file=sys.stderr, flush=True)
    if row is None:
        row = measure(run)
        rows.append(row)
    if run.name in HACKS:
        row["stopped_at"] = stopped_at(row)
    if run.name in POISON:
        rules = run.config().traffic.batch
        row |= {"advantage_limit": rules.advantage_limit, "cap_organisation": rules.cap_organisation}
    write_rows(file, rows)


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2", type=integers, help="comma-separated integers (default: 0,1,2)")
    arms = ",".join((*ARMS, KILLS))
    parser.add_argument("--arms", default=arms, help=f"comma-separated; nothing measures none (default: {arms})")
    parser.add_argument("--population", help="of composer_jax/demo/populations (default: first, or that of the arm)")
    parser.add_argument("--workdir", type=Path, default=Path("runs/traffic_learning"), help="parent of all runs")
    parser.add_argument("--rows", type=Path, default=ROWS, help=f"file of the rows (default: {ROWS})")
    parser.add_argument("--picture", type=Path, help="file of the picture (default: none)")
    parser.add_argument("--size", choices=list(SESSIONS), default="traffic", help="of configs/tiny.py")
    o = parser.parse_args(argv)
    names = [name for name in o.arms.split(",") if name]
    if unknown := [name for name in names if name not in (*ARMS, KILLS)]:
        parser.error(f"--arms names {unknown[0]!r}; use some of {arms}")
    rows = read_rows(o.rows)
    for seed in o.seeds:
        for name in names:
            if name != KILLS:
                population = o.population or POPULATIONS[name]
                complete(rows, ArmRun(o.workdir, o.size, seed, name, population, SESSIONS[o.size]), o.rows)
    if KILLS in names and not any(row.get("name") == KILLS for row in rows):
        rows.append({"name": KILLS, **measure_kills(o.workdir / KILLS)})
        write_rows(o.rows, rows)
    if o.picture:
        draw(rows, o.picture)
    summary = summarize(rows)
    print(table(summary))
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
