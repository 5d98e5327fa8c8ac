"""What the rows of benchmarks.traffic_learning say: differences with intervals over users, and what was stopped."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.seeded_runs import Row
from composer_jax.atomic_write import write_atomically

ROWS = Path("docs/data/traffic_learning.json")
CONTROLS = ("none", "rejection", "prompt")
POISON = ("poison_capped", "poison_uncapped")
POISONER = "yew"
"""The organisation of the populations that poisons."""
KILLS = "kills"
"""The name of the row with the killed cycles."""
CHANGED = 7
"""The first cycle after the change of taste, in both populations."""
Sums = Mapping[str, tuple[float, float]]
"""User -> (sum of a measure, how often it was measured)."""


def read_rows(file: Path) -> list[Row]:
    """Returns the rows of a file; none if it is not there."""
    return json.loads(file.read_bytes()) if file.exists() else []


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    """Writes one row a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    write_atomically(file, f"[\n{lines}\n]\n".encode())


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
    return rounded({"difference": difference, "low": low, "high": high, "users": len(influences)})


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


def table(summary: Mapping[str, Any]) -> str:
    """Returns the gains of the loop and its controls, and the loop's lead, as a table in Markdown."""
    lines = [
        "| population | arm | kept | satisfied | loop above it, kept | loop above it, satisfied |",
        "|" + "---|" * 6,
    ]
    for population, of in {"first": summary, "second": summary.get("second", {})}.items():
        for arm in of.get("kept", {}):
            found = [of.get(column, {}).get(arm) for column in ("kept", "satisfied", "kept_above", "satisfied_above")]
            cells = ("{difference:+.3f} [{low:.3f}, {high:.3f}]".format(**one) if one else "" for one in found)
            lines.append(f"| {population} | {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _summarize_learning(rows: Sequence[Row]) -> dict[str, Any]:
    by_arm: dict[str, dict[int, Row]] = {}
    for row in rows:
        by_arm.setdefault(row["arm"], {})[row["seed"]] = row
    out: dict[str, Any] = {}
    for name, runs in by_arm.items():
        if name in ("loop", *CONTROLS):
            last = min(CHANGED - 1, *(len(row["cycles"]) for row in runs.values()))
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
    if stops := _stops(by_arm.get("edits_priced", {})):
        out["hack_stopped_at"] = None if None in stops else max(fraction for fraction, _ in stops)
    if stops := _stops(loop):
        out["loop_stopped_at"] = min((stop[0] for stop in stops if stop is not None), default=None)
    for name in POISON:
        if name in by_arm:
            out.setdefault("poison", {})[name] = _poison(list(by_arm[name].values()))
    return out


def _stops(runs: Mapping[int, Row]) -> list[Any]:
    """Returns where the runs were stopped (benchmarks/traffic_hack.py: stopped_at); not of those without a canary."""
    return [row["stopped_at"] for row in runs.values() if "stopped_at" in row]


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


def rounded(value: Any) -> Any:
    """Returns plain JSON with numbers of four digits after the point."""
    if isinstance(value, Mapping):
        return {name: rounded(one) for name, one in value.items()}
    return round(value, 4) if isinstance(value, float) else value
