"""The table that launch.search_layout prints about a search (scale/search.py)."""

from collections.abc import Mapping
from typing import Any


def format_search(result: Mapping[str, Any], rows: int) -> str:
    """Returns a Markdown table of the best `rows` layouts and the config's own, and the flags of the best."""
    shown = result["rows"][:rows]
    if result["own"] not in shown:
        shown = [*shown, result["own"]]
    limit = result["limit"] / 2**30
    lines = [
        "",
        f"{result['stage']} on {result['topology']}, a device has {limit:.1f} GiB; * is the config's own layout; "
        f"seconds with {result['overlap'].replace('_', ' ')}",
        "",
        "| layout | seconds | MFU | without overlap | GiB | takes most |",
        "|---|---|---|---|---|---|",
        *(_row(row, row == result["own"]) for row in shown),
        "",
    ]
    counts = result["counts"]
    lines.append(
        f"{counts['layouts']} layouts of {counts['meshes']} meshes estimated, {counts['too_large']} too large; "
        f"{len(result['rows'])} traced; {result['search_seconds']:.0f} s"
    )
    if result["best"] is None:
        lines.append("None of the compiled layouts fits; raise --compiles.")
    else:
        overrides = " ".join(f"--config.{path}={value}" for path, value in result["best"]["layout"].items())
        lines.append(f"best: {overrides}")
    return "\n".join(lines)


def _row(row: Mapping[str, Any], own: bool) -> str:
    most = ", ".join(f"{kind} {fraction:.0%}" for kind, fraction in row["largest_fractions"].items())
    return (
        f"| {'* ' if own else ''}{row['text']} | {row['seconds']:.4g} | {row['mfu']:.1%} "
        f"| {row['step_seconds']['no_overlap']:.4g} | {_memory(row)} | {most} |"
    )


def _memory(row: Mapping[str, Any]) -> str:
    if row["compiled_bytes"] is not None:
        return f"{row['compiled_bytes'] / 2**30:.1f}, {'fits' if row['fits'] else 'does not fit'}"
    return "?" if row["estimated_bytes"] is None else f"~{row['estimated_bytes'] / 2**30:.0f}"
