"""Production traffic on scripted users: `python -m benchmarks.traffic [--fresh]`.

Prints from the rows of docs/data/traffic.json, and of traffic_learning.json beside it, what has been measured. Of the
first file, rows that are missing are measured, or all with --fresh; a row is one function of MEASURES. Prints progress
on stderr and, as the last line of stdout, one JSON object:
    label_bias_z        mean over 20 seeds of (kept lines of the labels - their expectation in closed form), in standard
                        errors over the seeds; label_bias is the mean itself. Labels are made every ten minutes by runs
                        that see only what has arrived
    by_now_z, by_now    the same for one run at the end of the cycle that takes every session for old enough: a revert
                        counts 0 as soon as it is known, kept edits count when they have been measured. In its cycles no
                        measurement is lost
    changed             sessions that have another label from one late run
    labels_per_s        sessions labelled per second on one core in that run, with all signals and the rules as judge
    user_cycles         users of every cycle, summed over the cycles
    sessions            of the simulated cycles
    false_alarms        canaries of equal weights that the sequence stops, looked at after every user: the largest of
                        three fractions of the users; fixed_false_alarms the same of a test of 1.96 standard errors
    found_matched, found_two_arms
                        canaries whose effect of 0.1 standard deviations 2,000 users show
    gate_equal, gate_worse
                        candidates that the gate of three suites passes: equal ones, and ones that are worse by the
                        margin in one suite; gate_tasks are those of every suite. `benchmarks.traffic_statistics` has
                        all cases
    gate                {"refused": of the worse ones, "passed": of the equal ones}
    kills, kill_points  kill -9 of a process that takes releases through every state, before every write
    problems            versions, states, pins or sessions that are wrong after them (benchmarks/traffic_kills.py)
    label_kills         kill -9 of a process that labels, a new one each time
    baseline_shrinkage, baseline_ridge
                        variance of returns that a baseline takes away over that which the true conditional mean takes
                        away, the smallest of 20 batches of 10,000 sessions; baseline_true is the part that the true
                        mean takes, and baseline_gradient_z how far a baseline moves the mean of the policy gradient, in
                        standard errors (benchmarks/traffic_baselines.py)
    poison_traffic, poison_moves, poison_bound
                        share of an organisation that reports the reverse of the truth in the trained tokens and in what
                        moves the policy, and the most that the caps allow; poison_moves_uncapped without caps
    poison_truth, poison_truth_uncapped
                        what a batch with it does for answers that pass hidden tests, over that of one without it
    batch_bytes, batch_per_s
                        most memory while a batch is built, for each session, beside the labels; sessions selected per
                        second on one core
                        (benchmarks/traffic_batches.py)
    kept, satisfied, kept_above, satisfied_above, recovered, malformed_calls, edits, hack_stopped_at, poison
                        of simulated users; `benchmarks.traffic_learning` measures and explains them
    lost                sessions without a label, or with another one than an undisturbed run makes, after the kills
"""

import argparse
import dataclasses
import json
import math
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import traffic_baselines, traffic_batches, traffic_learning_rows
from benchmarks.seeded_runs import Row
from benchmarks.traffic_kills import kill_everywhere
from benchmarks.traffic_statistics import EFFECT, MARGIN, SUITES, gate_rates, matched_rate, rejection_rates
from composer_jax.atomic_write import write_atomically
from composer_jax.observe.progress import Progress, hide_progress
from composer_jax.realtime.labels.label_sessions import label_sessions
from composer_jax.realtime.labels.signal_table import SIGNALS
from composer_jax.realtime.labels.signal_types import LabelContext, Signal, observed
from composer_jax.realtime.labels.store import Label, LabelStore
from composer_jax.realtime.labels.window import events_of
from composer_jax.realtime.simulation import SimulatedCycle, SimulatedPolicy, SimulatedText, SimulatedWorld
from composer_jax.serve.traffic.records import SessionTraffic

ROWS = Path("docs/data/traffic.json")
HORIZON_S = 3600.0
SEEDS = 20
WORLD = SimulatedWorld(users=4000, sessions=2500)
KILLED = SimulatedWorld(users=500, sessions=2000)
KILLS = 10
"""Half of them before the first label is stored, half after a process has stored some."""


def measure_labels() -> Row:
    """Labels all cycles every ten minutes; compares with the expectation, with one late run, and with a control."""
    at_age, by_now, users, sessions, changed, seconds = [], [], 0, 0, 0, 0.0
    with Progress(SEEDS, "cycles", "labels at one age") as progress:
        for seed in range(SEEDS):
            cycle = SimulatedCycle(WORLD, SimulatedPolicy(), seed)
            database = sqlite3.connect(":memory:")
            labels = {}
            for now in range(10**9, int(cycle.ended.max() + 2 * HORIZON_S) + 1200, 600):
                labels |= _signals(_label(cycle.at(now), database, now))
            kept = [signals["keep"].value for signals in labels.values()]
            expected = cycle.expected_keep(HORIZON_S)
            at_age.append(statistics.fmean(value for value in kept if value is not None) - expected)

            began = time.perf_counter()
            late = _signals(_label(cycle, sqlite3.connect(":memory:"), cycle.all_aged))
            seconds += time.perf_counter() - began
            changed += sum(labels.get(session) != signals for session, signals in late.items())

            by_now.append(_mean_outcome_by_now(seed) - expected)
            users, sessions = users + len(set(cycle.user.tolist())), sessions + len(labels)
            progress.update()
    return {
        "label_bias_z": round(_z(at_age), 3),
        "label_bias": round(statistics.fmean(at_age), 5),
        "by_now_z": round(_z(by_now), 2),
        "by_now": round(statistics.fmean(by_now), 5),
        "changed": changed,
        "labels_per_s": round(sessions / seconds),
        "user_cycles": users,
        "sessions": sessions,
    }


def _z(differences: Sequence[float]) -> float:
    return statistics.fmean(differences) / (statistics.stdev(differences) / len(differences) ** 0.5)


def _mean_outcome_by_now(seed: int) -> float:
    """Returns the mean of `known_outcome` from a run at the end of a cycle that does not wait for any session."""
    world = dataclasses.replace(WORLD, censored=0.0, late=0.0)
    cycle = SimulatedCycle(world, SimulatedPolicy(), seed).at(1e9 + WORLD.cycle_s)
    own = {"outcome": f"{__name__}:{known_outcome.__name__}"}
    labels = _label(cycle, sqlite3.connect(":memory:"), math.inf, own)
    return statistics.fmean(value for one in labels if (value := one.signals["outcome"].value) is not None)


def known_outcome(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns 0 as soon as the user has reverted the edits, else the measured share of kept lines."""
    return observed(0.0) if events_of(traffic, "undo") else SIGNALS["keep"](traffic, horizon, context)


def _label(
    cycle: SimulatedCycle, database: sqlite3.Connection, now: float, own: Mapping[str, str] | None = None
) -> Sequence[Label]:
    """Returns the labels that one run at a moment makes."""
    hide_progress()
    context = LabelContext(SimulatedText())
    run = label_sessions(cycle, database, HORIZON_S, context=context, own_signals=own, clock=lambda: now)
    hide_progress(False)
    return run.labels


def _signals(labels: Sequence[Label]) -> dict[str, Mapping[str, Signal]]:
    return {label.session: label.signals for label in labels}


def measure_kills() -> Row:
    """Kills processes that label one cycle, and compares their labels with those of a run that nobody disturbed."""
    cycle = SimulatedCycle(KILLED, SimulatedPolicy(), SEEDS)
    expected = _signals(_label(cycle, sqlite3.connect(":memory:"), cycle.all_aged))
    folder, kills = Path(tempfile.mkdtemp()), 0
    try:
        file = folder / "traffic.sqlite"
        with Progress(KILLS, "kills", "killed labellers") as progress:
            for number in range(KILLS):
                kills += _kill_labeller(file, after_labels=number >= KILLS // 2)
                progress.update()
        subprocess.run(_labeller(file), check=True, stdout=sys.stderr)
        database = _open(file)
        labels = _signals(LabelStore(database).read(HORIZON_S))
        database.close()
    finally:
        shutil.rmtree(folder)
    return {"label_kills": kills, "lost": sum(labels.get(name) != one for name, one in expected.items())}


def _kill_labeller(file: Path, *, after_labels: bool) -> bool:
    """Starts a process that labels and kills it; returns whether it was still at work.

    after_labels: when it has stored its first labels, instead of when it has begun.
    """
    with subprocess.Popen(_labeller(file), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has opened the database
        if after_labels:
            database = _open(file)
            before = _count(database)
            while _count(database) == before and process.poll() is None:
                time.sleep(0.001)
            database.close()
        process.kill()
        process.wait()
        return process.returncode < 0


def _labeller(file: Path) -> list[str]:
    """Returns the command of the process that is killed."""
    return [sys.executable, "-m", "benchmarks.traffic", f"--label_into={file}"]


def _open(file: Path) -> sqlite3.Connection:
    database = sqlite3.connect(file, timeout=30.0)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    return database


def _count(database: sqlite3.Connection) -> int:
    LabelStore(database)
    return database.execute("SELECT count(*) FROM labels").fetchone()[0]


def label_into(file: Path) -> None:
    """Labels the cycle of `measure_kills` into a database."""
    database = _open(file)
    print("labelling", flush=True)
    cycle = SimulatedCycle(KILLED, SimulatedPolicy(), SEEDS)
    _label(cycle, database, cycle.all_aged)
    database.close()


def measure_statistics() -> Row:
    """Simulates canaries and gates of candidates whose effect is known."""
    alarms = [rejection_rates(0.0, fraction, seed=3) for fraction in (0.5, 0.25, 0.05)]
    equal, worse = gate_rates((0.0,) * SUITES), gate_rates((MARGIN, *(0.0,) * (SUITES - 1)))
    return {
        "false_alarms": max(row["confidence_sequence"] for row in alarms),
        "fixed_false_alarms": max(row["fixed"] for row in alarms),
        "found_matched": matched_rate(EFFECT),
        "found_two_arms": rejection_rates(EFFECT, 0.5, seed=4)["confidence_sequence"],
        "gate_equal": equal["passed"],
        "gate_worse": worse["passed"],
        "gate_tasks": equal["tasks_per_suite"],
    }


def measure_release_kills() -> Row:
    """Kills the scripted cycle of releases before each of its writes."""
    with tempfile.TemporaryDirectory() as folder:
        result = kill_everywhere(Path(folder))
    return {"kill_points": result["points"], "kills": result["kills"], "problems": len(result["problems"])}


def measure_baselines() -> Row:
    """Compares the baselines of batches with the conditional mean of scripted users."""
    result = traffic_baselines.measure()
    return {
        "baseline_shrinkage": result["shrinkage_removes"],
        "baseline_ridge": result["ridge_removes"],
        "baseline_true": result["true_removes"],
        "baseline_gradient_z": result["gradient_z"],
    }


MEASURES: Mapping[str, Callable[[], Row]] = {
    "labels": measure_labels,
    "label_kills": measure_kills,
    "statistics": measure_statistics,
    "release_kills": measure_release_kills,
    "baselines": measure_baselines,
    "batches": traffic_batches.measure,
}
"""Name of a row -> what measures it."""


def read_rows(file: Path) -> dict[str, Row]:
    """Returns the rows of a file by name; those that no measure makes are left out."""
    rows = json.loads(file.read_bytes()) if file.exists() else []
    return {row["name"]: row for row in rows if row["name"] in MEASURES}


def summarize(rows: Mapping[str, Row]) -> dict[str, Any]:
    """Returns the printed object: the values of all rows side by side, and "lost" as the sum of those that have it."""
    out: dict[str, Any] = {}
    for row in rows.values():
        out |= {key: value for key, value in row.items() if key not in ("name", "lost")}
    lost = [row["lost"] for row in rows.values() if "lost" in row]
    if {"gate_equal", "gate_worse"} <= out.keys():
        out["gate"] = {"refused": round(1 - out["gate_worse"], 4), "passed": out["gate_equal"]}
    return out | ({"lost": sum(lost)} if lost else {})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROWS, help=f"file of the rows (default: {ROWS})")
    parser.add_argument("--fresh", action="store_true", help="measure every row again")
    parser.add_argument("--only", help="comma-separated names of rows (default: all of them)")
    parser.add_argument("--label_into", type=Path, help=argparse.SUPPRESS)
    o = parser.parse_args(argv)
    if o.label_into:
        return label_into(o.label_into)
    names = o.only.split(",") if o.only else list(MEASURES)
    if unknown := [name for name in names if name not in MEASURES]:
        parser.error(f"--only names {unknown[0]!r}; use some of {', '.join(MEASURES)}")
    rows = read_rows(o.rows)
    for name in names:
        if o.fresh or name not in rows:
            rows[name] = {"name": name, **MEASURES[name]()}
            o.rows.parent.mkdir(parents=True, exist_ok=True)
            ordered = [rows[one] for one in MEASURES if one in rows]
            write_atomically(o.rows, (json.dumps(ordered, indent=1) + "\n").encode())
    learned = traffic_learning_rows.summarize(
        traffic_learning_rows.read_rows(o.rows.with_name(traffic_learning_rows.ROWS.name))
    )
    print(json.dumps(learned | summarize({name: rows[name] for name in names})))


if __name__ == "__main__":
    main()
