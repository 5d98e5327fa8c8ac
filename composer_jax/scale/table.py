"""The tables that launch.compile prints about a plan (scale/plan.py)."""

from collections.abc import Iterable


def format_table(plan: dict) -> str:
    """Returns tables of memory, seconds, bytes sent and the largest costs, each with a heading."""
    memory, times = plan["bytes_per_chip"], plan["step_seconds"]
    lines = [
        "",
        f"{plan['stage']} on {plan['topology']}: {plan['params_total'] / 1e9:,.1f} billion parameters, "
        f"{plan['params_active'] / 1e9:,.1f} active; {plan['tokens_per_step']:,} tokens a step",
        "",
        f"memory of one device, GiB ({plan['largest_program']}, the largest program)",
        *_rows(
            (name, f"{size / 2**30:10.2f}", "")
            for name, size in memory.items()
            if name not in ("total", "limit", "refused") and size
        ),
        *_rows([("total", f"{memory['total'] / 2**30:10.2f}", f"of {memory['limit'] / 2**30:.2f}: {_verdict(plan)}")]),
        *([f"  {memory['refused']}"] if "refused" in memory else []),
        "",
        "predicted seconds of a step",
        *_rows((name.replace("_", " "), f"{s:10.4g}", "") for name, s in times.items()),
        f"  predicted: {plan['predicted_step_seconds']:.4g} s, {plan['predicted_mfu']:.1%} MFU, "
        f"{plan['predicted_tokens_per_second_per_chip']:,.1f} tokens per second and chip",
        "",
        "where the seconds go, without overlap",
        *_rows(
            (name, f"{seconds:10.4g}", f"{seconds / times['no_overlap']:6.1%}")
            for name, seconds in sorted(plan["profile_seconds"].items(), key=lambda item: -item[1])
        ),
        "",
        "bytes that a device sends in a step, GB",
        *_rows((axes, f"{sent / 1e9:10.3f}", "") for axes, sent in plan["collective_bytes"].items()),
        "",
        "the largest, without overlap",
        *_rows((p["kind"], f"{p['seconds']:10.4g}", p["scope"]) for p in plan["largest_seconds"]),
        "",
        f"compiled in {plan['compile_seconds']:.1f} s",
    ]
    return "\n".join(lines)


def _verdict(plan: dict) -> str:
    return "fits" if plan["fits"] else "does not fit"


def _rows(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    return [f"  {name:<32}{value}  {note}".rstrip() for name, value, note in rows]
