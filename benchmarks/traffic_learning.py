"""Whether a model learns from its users: `python -m benchmarks.traffic_learning [--arms=loop,none] [--seeds=0,1,2]`.

Runs of tiny:traffic (benchmarks/traffic_arms.py) in which simulated users work with a version of the weights in every
cycle. A run that was stopped goes on; a finished one is a row of --rows, by population, seed and arm, and does not run
again. All arms of a seed have the same base, users and requests. Measures are those of users whose organisation does
not poison, over the sessions of a cycle:

    kept        share of the agent's lines that are left after one hour, 0 without edits
    satisfied   share of the user's further messages that say that the edit is right

Prints progress on stderr and, as the last line of stdout, one JSON object, with what has rows:

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
                loop_stopped_at is the same of the loop
    poison      arm -> share of the organisation in the traffic, in what moves the policy, and the bound of caps.py
    learning_kills, learning_lost
                kill -9 of two cycles (benchmarks/traffic_learning_kills.py), and versions that differ after them
"""

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.seeded_runs import Row, integers
from benchmarks.traffic_arms import ARMS, ArmRun, read_json, truths_of
from benchmarks.traffic_hack import stopped_at
from benchmarks.traffic_learning_kills import measure_kills
from composer_jax.atomic_write import write_atomically
from composer_jax.demo.users import KEPT_S, SimulatedUsers
from composer_jax.observe.metrics import read_metrics
from composer_jax.realtime.release.gate import GateRules, gate, read_evaluation
from composer_jax.realtime.release.releases import read_releases
from configs import tiny

ROWS = Path("docs/data/traffic_learning.json")
CONTROLS = ("none", "rejection", "prompt")
HACKS = ("edits_priced", "loop")
"""Arms whose releases meet a gate with monitors and scripted users; those of the loop show what is stopped in vain."""
POISON = ("poison_capped", "poison_uncapped")
POISONER = "yew"
"""The organisation of the populations that poisons."""
POPULATIONS = {name: "poisoned" if name in POISON else "first" for name in ARMS}
"""Arm -> its population, unless --population names one."""
SESSIONS = {"traffic": 256, "traffic_smoke": 12}
SHOWN = ("kept", "kept_of_edited", "good", "good_at_first", "satisfied_follow_ups", "edit_rate", "question_rate")
COLUMNS = (*SHOWN, "malformed_call_rate", "tokens")
"""Of demo/users.py: summarize, which a row has of each cycle."""
KILLS = "kills"
"""The arm of the row with the killed cycles."""
CHANGED = 7
"""The first cycle after the change of taste, in both populations."""
Sums = Mapping[str, tuple[float, float]]
"""User -> (sum of a measure, how often it was measured)."""


# ---------------------------------------------------------------------------------------------------- one run's row


def measure(run: ArmRun) -> Row:
    """Plays a run, and returns its row."""
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
        cycles.append({"cycle": cycle, **_rounded({name: means[name] for name in COLUMNS}), "users": by_user})
    row = {"population": run.population, "seed": run.seed, "arm": run.name, "sessions": run.sessions}
    releases = [_release(run.workdir, one) for one in read_releases(run.workdir)] if run.arm.learns else []
    return row | {"cycles": cycles, "releases": releases, "seconds": round(time.monotonic() - began)}


def _release(workdir: Path, release: Any) -> Row:
    """Returns what became of a release: its state, its update, and the monitors of its batch."""
    updates = [row for row in read_metrics(workdir / "metrics" / "rl.jsonl") if row.get("release") == release.number]
    manifest = read_json(workdir / "batches" / f"{release.number:04d}" / "batch.json") or {}
    suites = (release.gate or {}).get("suites", {})
    return {
        "release": release.number,
        "anchor": release.anchor,
        "version": release.version,
        "state": release.state,
        "reason": release.transitions[-1]["reason"],
        "gate": {name: _rounded({"mean": suite["mean"], "lower": suite["lower"]}) for name, suite in suites.items()},
        "minibatches": len(updates),
        "sampler_kl": _rounded({"kl": updates[-1].get("sampler_kl")})["kl"] if updates else None,
        "monitored": _monitored(workdir, release),
        "batch_sessions": len(manifest.get("sessions", ())),
        "monitors": _rounded(_monitors(manifest)),
    }


def _monitored(workdir: Path, release: Any) -> dict[str, Any] | None:
    """Returns what a gate with all its monitors says of a candidate: {"verdict", "reasons"}; None without one."""
    files = [workdir / "evaluations" / f"{version}.json" for version in (release.anchor, release.version)]
    if not all(file.exists() for file in files):
        return None
    anchor, candidate = (read_evaluation(file)["suites"] for file in files)
    result = gate(anchor, candidate, GateRules(margin=tiny.get_config("traffic").traffic.gate.margin))
    return {"verdict": result["verdict"], "reasons": result["reasons"]}


def _monitors(manifest: Mapping[str, Any]) -> dict[str, Any]:
    monitors = manifest.get("monitors", {})
    names = ("effective_users", "mean_advantage", "explained_variance", "organisations")
    return {name: monitors[name] for name in names if name in monitors}


def _rounded(value: Any) -> Any:
    """Returns plain JSON with numbers of four digits after the point."""
    if isinstance(value, Mapping):
        return {name: _rounded(one) for name, one in value.items()}
    return round(value, 4) if isinstance(value, float) else value


# -------------------------------------------------------------------------------------------------- what rows say


def clustered_difference(one: Sums, other: Sums) -> dict[str, Any] | None:
    """Returns the mean of `one` minus that of `other` with a 95 % interval over users, who may be in both.

    The standard error is that of the sum of the users' influences on a difference of two ratios. None where one of both
    was measured for nobody.
    """
    totals = [(sum(s for s, _ in side.values()), sum(n for _, n in side.values())) for side in (one, other)]
    if not all(count for _, count in totals):
        return None
    (a, n), (b, m) = totals
    influences = []
    for user in {**one, **other}:
        (s, k), (t, j) = one.get(user, (0.0, 0.0)), other.get(user, (0.0, 0.0))
        influences.append((s - a / n * k) / n - (t - b / m * j) / m)
    error, difference = float(np.sqrt(np.square(influences).sum())), a / n - b / m
    low, high = difference - 1.96 * error, difference + 1.96 * error
    return _rounded({"difference": difference, "low": low, "high": high, "users": len(influences)})


def sums(rows: Iterable[Row], cycle: int, measure: str) -> dict[str, tuple[float, float]]:
    """Returns the sums of "kept" or "satisfied" of all users of rows in a cycle; users of two seeds are two."""
    found = {}
    for row in rows:
        (content,) = [one for one in row["cycles"] if one["cycle"] == cycle]
        for user, (sessions, kept, follow_ups, satisfied) in content["users"].items():
            pair = (kept, sessions) if measure == "kept" else (satisfied, follow_ups)
            found[f"{row['seed']}/{user}"] = pair
    return found


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the printed object: of the first population, and {"second": ...} of the second one."""
    learned = [row for row in rows if "arm" in row]
    out = _summarize_learning([row for row in learned if row["population"] != "second"])
    if second := [row for row in learned if row["population"] == "second"]:
        out["second"] = _summarize_learning(second)
    for row in rows:
        if row.get("name") == KILLS:
            out |= {"learning_kills": row["kills"], "learning_lost": row["lost"]}
    return out


def _summarize_learning(rows: Sequence[Row]) -> dict[str, Any]:
    by_arm: dict[str, dict[int, Row]] = {}
    for row in rows:
        by_arm.setdefault(row["arm"], {})[row["seed"]] = row
    out: dict[str, Any] = {}
    for name, runs in by_arm.items():
        if name in ("loop", *CONTROLS):
            last = min(CHANGED - 1, ARMS[name].cycles)
            for key in ("kept", "satisfied"):
                gain = clustered_difference(sums(runs.values(), last, key), sums(runs.values(), 1, key))
                out.setdefault(key, {})[name] = gain
        out.setdefault("malformed_calls", {})[name] = _curve(runs.values(), "malformed_call_rate")
        out.setdefault("edits", {})[name] = _curve(runs.values(), "edit_rate")
    loop = by_arm.get("loop", {})
    for name in CONTROLS:
        if common := sorted(loop.keys() & by_arm.get(name, {}).keys()):
            for key in ("kept", "satisfied"):
                one, other = (sums((runs[seed] for seed in common), CHANGED - 1, key) for runs in (loop, by_arm[name]))
                out.setdefault(f"{key}_above", {})[name] = clustered_difference(one, other)
    if loop:
        out["recovered"] = _recovered(list(loop.values()))
    for key, name in (("hack_stopped_at", "edits_priced"), ("loop_stopped_at", "loop")):
        if name in by_arm:
            stops = [row["stopped_at"] for row in by_arm[name].values()]
            out[key] = None if None in stops else max(fraction for fraction, _ in stops)
    for name in POISON:
        if name in by_arm:
            out.setdefault("poison", {})[name] = _poison(list(by_arm[name].values()))
    return out


def _curve(rows: Iterable[Row], column: str) -> list[float | None]:
    """Returns the means over rows, by cycle."""
    by_cycle = zip(*([cycle[column] for cycle in row["cycles"]] for row in rows), strict=True)
    return [_mean([value for value in values if value is not None]) for values in by_cycle]


def _mean(values: Sequence[float]) -> float | None:
    return round(statistics.fmean(values), 4) if values else None


def _recovered(rows: Sequence[Row]) -> list[float] | None:
    """Returns (kept - kept of the first cycle after the change) / (loss of that cycle), one and two cycles later."""
    kept = _curve(rows, "kept")
    before, changed, *later = kept[CHANGED - 2 :] if len(kept) >= CHANGED else (None, None)
    if before is None or changed is None or before <= changed:
        return None
    return [round((one - changed) / (before - changed), 3) for one in later if one is not None]


def _poison(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the shares of the organisation that poisons in the batch that it moves most, and the bound there.

    The bound is advantage_limit * cap_organisation / mean |advantage| (caps.py), and 1.
    """
    found = []
    for row in rows:
        for monitors in (release["monitors"] for release in row["releases"]):
            if shares := monitors.get("organisations", {}).get(POISONER):
                bound = row["advantage_limit"] * row["cap_organisation"] / monitors["mean_advantage"]
                found.append({**shares, "bound": round(min(1.0, bound), 4)})
    return max(found, key=lambda one: one["advantages"], default={}) | {"kept": _curve(rows, "kept")}


# ------------------------------------------------------------------------------------------------------ rows on disk


def read_rows(file: Path) -> list[Row]:
    """Returns the rows of a file; none if it is not there."""
    return json.loads(file.read_bytes()) if file.exists() else []


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    """Writes one row a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    write_atomically(file, f"[\n{lines}\n]\n".encode())


def complete(rows: list[Row], run: ArmRun, file: Path) -> None:
    """Adds the row of a run if it is missing, and writes the file."""
    key = (run.population, run.seed, run.name)
    if any((row.get("population"), row.get("seed"), row.get("arm")) == key for row in rows):
        return
    print(f"traffic_learning: {run.name} of {run.population}, seed {run.seed}", file=sys.stderr, flush=True)
    row = measure(run)
    if run.name in HACKS:
        row["stopped_at"] = stopped_at(row)
    if run.name in POISON:
        rules = run.config().traffic.batch
        row |= {"advantage_limit": rules.advantage_limit, "cap_organisation": rules.cap_organisation}
    rows.append(row)
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
    print(json.dumps(summarize(rows)))


if __name__ == "__main__":
    main()
