"""The tables that launch.compile prints about a plan (scale/plan.py), and launch.search_layout about a search."""

from collections.abc import Iterable, Mapping
from typing import Any


def format_table(plan: Mapping[str, Any]) -> str:
    """Returns tables of memory, seconds, bytes sent and the largest costs of every step, each with a heading."""
    steps = {f"{plan['stage']} on {plan['topology']}": plan}
    if "decode" in plan:
        main = {} if plan["stage"] == "evaluate" else steps
        steps = main | {"decode": plan["decode"]} | plan["prefill"]
    lines = [line for title, step in steps.items() for line in _step_table(title, step)]
    return "\n".join([*lines, "", f"compiled in {plan['compile_seconds']:.1f} s"])


def _step_table(title: str, step: Mapping[str, Any]) -> list[str]:
    memory, times = step["bytes_per_chip"], step["step_seconds"]
    verdict = "fits" if step["fits"] else "does not fit"
    return [
        "",
        f"{title}: {step['params_total'] / 1e9:,.1f} billion parameters, "
        f"{step['params_active'] / 1e9:,.1f} active; {step['tokens_per_step']:,} tokens a step",
        "",
        f"memory of one device, GiB ({step['largest_program']}, the largest program)",
        *_rows(
            (name, f"{size / 2**30:10.2f}", "")
            for name, size in memory.items()
            if name not in ("total", "limit", "refused") and size
        ),
        *_rows([("total", f"{memory['total'] / 2**30:10.2f}", f"of {memory['limit'] / 2**30:.2f}: {verdict}")]),
        *([f"  {memory['refused']}"] if "refused" in memory else []),
        "",
        "predicted seconds of a step",
        *_rows((name.replace("_", " "), f"{s:10.4g}", "") for name, s in times.items()),
        f"  predicted: {step['predicted_step_seconds']:.4g} s, {step['predicted_mfu']:.1%} MFU, "
        f"{step['predicted_tokens_per_second_per_chip']:,.1f} tokens per second and chip",
        "",
        "where the seconds go, without overlap",
        *_rows(
            (name, f"{seconds:10.4g}", f"{seconds / times['no_overlap']:6.1%}")
            for name, seconds in sorted(step["profile_seconds"].items(), key=lambda item: -item[1])
        ),
        "",
        *_communication_table(step),
        "bytes that a device sends in a step, GB",
        *_rows((axes, f"{sent / 1e9:10.3f}", "") for axes, sent in step["collective_bytes"].items()),
        "",
        "the largest costs, without overlap",
        *_rows((p["kind"], f"{p['seconds']:10.4g}", p["scope"]) for p in step["largest_seconds"]),
    ]


def _communication_table(step: Mapping[str, Any]) -> list[str]:
    seconds = step.get("compiled_communication")
    if not seconds:
        return []
    exposed = seconds["exposed"]
    return [
        "seconds of communication in the compiled programs, and how many of them no computation hides",
        *_rows((axes, f"{sent:10.4g}", f"{exposed.get(axes, 0.0):10.4g}") for axes, sent in seconds["sent"].items()),
        "",
    ]


def _rows(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    return [f"  {name:<32}{value}  {note}".rstrip() for name, value, note in rows]


def format_search(result: Mapping[str, Any], rows: int) -> str:
    """Returns a Markdown table of the best `rows` layouts and the config's own, and the flags of the best.

    result: of scale/search.py: search_layouts.
    """
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
        *(_search_row(row, row == result["own"]) for row in shown),
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


def _search_row(row: Mapping[str, Any], own: bool) -> str:
    most = ", ".join(f"{kind} {fraction:.0%}" for kind, fraction in row["largest_fractions"].items())
    return (
        f"| {'* ' if own else ''}{row['text']} | {row['seconds']:.4g} | {row['mfu']:.1%} "
        f"| {row['step_seconds']['no_overlap']:.4g} | {_search_memory(row)} | {most} |"
    )


def _search_memory(row: Mapping[str, Any]) -> str:
    if row["compiled_bytes"] is not None:
        return f"{row['compiled_bytes'] / 2**30:.1f}, {'fits' if row['fits'] else 'does not fit'}"
    return "?" if row["estimated_bytes"] is None else f"~{row['estimated_bytes'] / 2**30:.0f}"
