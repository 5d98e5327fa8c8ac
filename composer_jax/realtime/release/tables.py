"""Releases as tables of the report's page."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from composer_jax.observe.findings import Table, TableRow
from composer_jax.realtime.release.releases import Release


def release_tables(releases: Sequence[Release]) -> list[Table]:
    """Returns a table of all releases, and of the last one what the gate and every look at its canary said."""
    if not releases:
        return []
    last = releases[-1]
    return [
        Table(
            "Releases, the last one first",
            ("state", "anchor", "candidate", "since", "reason"),
            "",
            [TableRow(f"release {one.number}", "", _release_cells(one), "") for one in reversed(releases)],
        ),
        *_gate_tables(last),
        *_canary_tables(last),
    ]


def _release_cells(release: Release) -> tuple[str, ...]:
    row = release.transitions[-1]
    state = f"{release.state} {release.fraction:.0%}" if release.state == "canary" else release.state
    candidate = "none yet" if release.version is None else f"{release.version}{' (A/A)' if release.is_aa else ''}"
    return state, str(release.anchor), candidate, _moment(row["time"]), row["reason"]


def _gate_tables(release: Release) -> list[Table]:
    suites: Mapping[str, Any] = (release.gate or {}).get("suites", {})
    rows = [
        TableRow(
            name,
            "",
            (f"{row['mean']:+.3f}", f"{row['lower']:+.3f}", str(row["tasks"]), "yes" if row["passed"] else "no"),
            "",
        )
        for name, row in suites.items()
    ]
    columns = ("solved, candidate - anchor", "lower bound, 95%", "tasks", "passed")
    return [Table(f"Gate of release {release.number}", columns, "", rows)] if rows else []


def _canary_tables(release: Release) -> list[Table]:
    names = sorted({name for seen in release.canary for name in seen["metrics"]})
    rows = [
        TableRow(
            _moment(seen["time"]),
            "",
            (
                f"{seen['fraction']:.0%}",
                f"{seen['candidates']} of {seen['users']}",
                *(_effect(seen["metrics"].get(name)) for name in names),
                seen["decision"],
            ),
            "",
        )
        for seen in release.canary
    ]
    columns = ("fraction", "users with the candidate", *names, "decision")
    return [Table(f"Canary of release {release.number}, look by look", columns, "", rows)] if rows else []


def _effect(metric: Mapping[str, Any] | None) -> str:
    if metric is None or metric["half_width"] is None:
        return "too few users"
    return f"{metric['effect']:+.3f} ± {metric['half_width']:.3f}"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
