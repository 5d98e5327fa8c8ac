"""The tables that launch.simulate prints about a study (scale/simulation/study.py)."""

from collections.abc import Mapping
from typing import Any

from composer_jax.scale.simulation.outcome import PHASES
from composer_jax.scale.simulation.study import MORE

_COLUMNS = {
    "sandboxes": lambda r: f"{r['sandboxes']:,}",
    "learn : rollout": lambda r: f"{r['learner_chips']}:{r['rollout_chips']}",
    "steps/day": lambda r: f"{r['steps_per_day']:.1f}",
    "episodes/h": lambda r: f"{r['episodes_per_hour']:,.0f}",
    "running": lambda r: f"{r['episodes_running']:,.0f}",
    "learner": lambda r: f"{r['learner_utilisation']:.0%}",
    "engines": lambda r: f"{r['engine_utilisation']:.0%}",
    "router": lambda r: f"{r['router_utilisation']:.0%}",
    "sandboxes used": lambda r: f"{r['sandbox_utilisation']:.0%}",
    "staleness": lambda r: f"{r['staleness_mean']:.2f}, {r['staleness_max']}",
    "dropped": lambda r: f"{r['dropped_fraction']:.1%}",
    "limit": lambda r: r["limit"],
}
"""Column -> text of a row. Utilisations are means over the measured time, staleness is mean and maximum in versions."""
_SCALES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))


def format_study(result: Mapping[str, Any]) -> str:
    """Returns the predicted speeds, a Markdown table of all rows, what the limits mean, and what to buy next."""
    speeds = result["speeds"]
    steps = ", ".join(f"{n}: {s * 1000:.1f}" for n, s in speeds["decode_steps"])
    rows = [[text(row) for text in _COLUMNS.values()] for row in result["rows"]]
    limits = sorted({row["limit"] for row in result["rows"]})
    return "\n".join(
        [
            f"predicted: {speeds['trained_tokens_per_s']:,.0f} trained tokens per second and chip; a replica of "
            f"{speeds['replica_chips']} chips decodes in ms, by conversations with {speeds['mean_context']:,} tokens: "
            f"{steps}; it prefills {1 / speeds['prefill_s']:,.0f} tokens per second",
            describe_costs(result["costs"]),
            "",
            *(f"| {' | '.join(cells)} |" for cells in [list(_COLUMNS), ["---"] * len(_COLUMNS), *rows]),
            "",
            *(f"{limit}: {PHASES[limit]}" for limit in limits),
            "",
            *(advise(best) for best in result["best"]),
        ]
    )


def describe_costs(costs: Mapping[str, float]) -> str:
    """Returns one sentence about what hosts move."""
    return (
        f"hosts: the message of a turn has {format_bytes(costs['message_bytes'])} and takes the learner's process 0 "
        f"{1000 * costs['message_s']:.2f} ms; a trained token has {costs['batch_token_bytes']:,} bytes in a batch; a "
        f"version is a patch of {format_bytes(costs['patch_bytes'])}"
    )


def format_bytes(n: float) -> str:
    """Returns a number of bytes with a unit."""
    scale, unit = next((scale, unit) for scale, unit in _SCALES if n >= scale or scale == 1)
    return f"{n / scale:.3g} {unit}"


def advise(best: Mapping[str, Any]) -> str:
    """Returns one sentence: what to buy next for the best split with one number of sandboxes, and what it gains."""
    where = (
        f"{best['sandboxes']:,} sandboxes, best split {best['learner_chips']}:{best['rollout_chips']} with "
        f"{best['steps_per_day']:.1f} steps a day"
    )
    bought = {name: gain for name, gain in best["gains"].items() if not name.startswith("rl.")}
    if not bought:
        return f"{where}: fewer than two steps, so nothing can be compared."
    name = max(bought, key=lambda thing: bought[thing])
    tried = ", ".join(f"{thing} {gain:+.1%}" for thing, gain in bought.items())
    free = ", ".join(f"{change} {gain:+.1%}" for change, gain in best["gains"].items() if change not in bought)
    least = max(0.01, 1 / best["steps"])
    verb = f"buy {name} next" if bought[name] >= least else f"buy nothing, no gain reaches {least:.1%}"
    return (
        f"{where}: {verb} (steps a day with {best['more_chips']:,} chips more, or {MORE:.0%} more of the others: "
        f"{tried}; without buying: {free})."
    )
