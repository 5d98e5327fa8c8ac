"""What RL forgets of SFT, and what keeping it costs: `python -m benchmarks.forgetting [--seeds=0,1] [--variants=...]`.

RL of configs/tiny.py plays bugs and chains with short summaries. What SFT taught beside them gets worse, above all the
reports of all items. There are two remedies: the KL to the policy before RL, charged in the advantage
(rl.algorithm.kl), and conversations of SFT beside the episodes of every step (rl.replay). The policies before RL are
those of benchmarks.controls (the same --workdir or --base, so that none is trained twice). A stopped run is continued,
and a finished one is a row of --rows.

    sft                     the policy before RL
    rl                      RL as the config has it
    replay                  RL with conversations of SFT (REPLAY)
    kl_*                    RL with this coefficient of the KL
    replay_and_kl           RL with both, at the middle coefficient

Prints progress on stderr and on stdout a table, in which every figure is a difference to "rl" in pass@1 over the tasks
of the seeds that both have, paired by task, with its 95 % interval. --picture=FILE draws what is kept against what it
costs. The last line of stdout is one JSON object: variant -> {"seeds", the means of MEASURES over them, "suites": suite
-> [pass@1, low, high], "minus_rl": suite, "kept" (all suites of KEPT) and "learned" (those of LEARNED) -> [difference,
low, high]}.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import PercentFormatter

from benchmarks.controls import RL, RL_CONTROLS, Seed
from benchmarks.seeded_runs import Row, complete_rows, make_parser
from composer_jax.errors import UserError
from composer_jax.evals.interval import interval
from composer_jax.observe.metrics import read_metrics
from composer_jax.observe.picture import LIGHT, new_figure, save_figure
from composer_jax.stages.controls import compare_by_task

KL_COEFFICIENTS = (0.01, 0.03, 0.1)
"""rl.algorithm.kl.coefficient."""
REPLAY: Mapping[str, Any] = {"rl__replay__fraction": 0.5, "rl__replay__weight": 0.3}
"""At a weight of 1 a token counts about as much as one with an advantage of 1. SFT teaches that anybody's notes are
right and that the end of a chain asks for any item, which RL's tasks contradict."""
KL: Mapping[float, Mapping[str, Any]] = {value: {"rl__algorithm__kl__coefficient": value} for value in KL_COEFFICIENTS}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "sft": {},
    "rl": RL_CONTROLS["rl"],
    "replay": REPLAY,
    **{f"kl_{value}": KL[value] for value in KL_COEFFICIENTS},
    "replay_and_kl": {**REPLAY, **KL[KL_COEFFICIENTS[1]]},
}
"""Name -> what the run changes in the config beside RL."""
KEPT = ("chain_long", "bugfix", "unseen")
"""Suites of what SFT taught and RL does not play, or plays without a rule of its own."""
LEARNED = ("one_bug", "two_bugs", "chain")
"""Suites of what the rewards of RL teach."""
MEASURES = ("step_s", "train_s", "learner_tokens", "sft_replay_tokens", "kl_reference")
"""Of the steps of a run of RL: their seconds, those in which the learner computed, the tokens of its rows and those of
conversations among them in a step, and the KL in nats per token in the last tenth of the steps."""


def measure(folder: Path, size: str, base: Path | None, seed: int, variant: str) -> Row:
    """Returns the row of a variant: that of benchmarks.controls with MEASURES, which the policy before RL lacks."""
    runs = Seed(folder, size, seed, base)
    sft = runs.start()
    if variant == "sft":
        return runs.row(variant, sft)
    workdir = runs.run(variant, base=sft / "checkpoints" / "sft", **RL, **VARIANTS[variant])
    return {**runs.row(variant, workdir), **step_measures(workdir)}


def step_measures(workdir: Path) -> dict[str, float | None]:
    """Returns MEASURES of a run of RL; None for one that its steps lack."""
    rows = read_metrics(workdir / "metrics" / "rl.jsonl")
    return {
        "step_s": round(sum(row["step_s"] for row in rows), 1),
        "train_s": round(sum(row["train_s"] for row in rows), 1),
        "learner_tokens": _mean([(row["tokens_per_s"] or 0) * row["train_s"] for row in rows]),
        "sft_replay_tokens": _mean([row.get("sft_replay_tokens") for row in rows]),
        "kl_reference": _mean([row.get("kl_reference") for row in rows[-max(1, len(rows) // 10) :]]),
    }


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the printed object. Raises a UserError if a variant and RL were measured on other tasks."""
    by_variant = {name: {row["seed"]: row for row in rows if row["variant"] == name} for name in VARIANTS}
    return {
        name: {
            "seeds": sorted(runs),
            **{of: _mean([run.get(of) for run in runs.values()]) for of in MEASURES},
            "suites": {suite: _pass_at_1(runs, suite) for suite in (*KEPT, *LEARNED)},
            "minus_rl": _minus_rl(name, runs, by_variant["rl"]),
        }
        for name, runs in by_variant.items()
        if runs
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.fmean(known), 4) if known else None


def _pass_at_1(runs: Mapping[int, Row], suite: str) -> list[float]:
    rates = [rate for run in runs.values() for rate in run["suites"][suite]["solved"].values()]
    return [round(number, 4) for number in (statistics.fmean(rates), *interval(rates))]


def _minus_rl(name: str, runs: Mapping[int, Row], references: Mapping[int, Row]) -> dict[str, list[float]]:
    """Returns the differences of a variant to RL, over the seeds that both have; {} for RL itself or without one."""
    seeds = sorted(runs.keys() & references.keys())
    if name == "rl" or not seeds:
        return {}
    groups = {suite: (suite,) for suite in (*KEPT, *LEARNED)} | {"kept": KEPT, "learned": LEARNED}

    def solved(of: Mapping[int, Row], suites: Sequence[str]) -> dict[str, Any]:
        return {f"{seed} {suite}": of[seed]["suites"][suite] for seed in seeds for suite in suites}

    out = {}
    for group, suites in groups.items():
        rl_minus = compare_by_task(solved(references, suites), solved(runs, suites), name)
        out[group] = [round(0.0 - rl_minus[number], 4) for number in ("difference", "high", "low")]
    return out


def table(measured: Mapping[str, Any]) -> str:
    """Returns the differences of all variants to RL as a table in Markdown."""
    columns = (*KEPT, "kept", *LEARNED, "learned")
    lines = [f"| variant | seeds | {' | '.join(columns)} |", f"|---|---|{'---|' * len(columns)}"]
    for name, of in measured.items():
        if of["minus_rl"]:
            cells = ("{:+.3f} [{:.3f}, {:.3f}]".format(*of["minus_rl"][column]) for column in columns)
            lines.append(f"| {name} | {', '.join(map(str, of['seeds']))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(measured: Mapping[str, Any], path: Path) -> Path:
    """Draws, for every variant, how much more than RL it keeps against how much less it learns."""
    figure, (ax,) = new_figure(LIGHT, 5.2, 3.4)
    ax.axhline(0, color=LIGHT.muted, linewidth=0.8)
    ax.axvline(0, color=LIGHT.muted, linewidth=0.8)
    ax.annotate("RL", (0, 0), xytext=(4, -11), textcoords="offset points", color=LIGHT.muted, fontsize=8.5)
    for name, of in measured.items():
        if name == "sft" or not of["minus_rl"]:
            continue  # the policy before RL has learned nothing of it
        (x, *xs), (y, *ys) = (of["minus_rl"][group] for group in ("learned", "kept"))
        color = LIGHT.palette[1 if name == "replay" else 2 if name == "replay_and_kl" else 0]
        x_error, y_error = ([[value - low], [high - value]] for value, (low, high) in ((x, xs), (y, ys)))
        ax.errorbar(x, y, y_error, x_error, fmt="o", color=color, capsize=3, markersize=5)
        ax.annotate(
            name.replace("_", " "), (x, y), xytext=(6, 4), textcoords="offset points", color=color, fontsize=8.5
        )
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.set_xlabel(f"{', '.join(LEARNED)}: pass@1 minus that of RL", fontsize=9, color=LIGHT.muted)
    ax.set_title(f"{', '.join(KEPT)}: pass@1 minus that of RL", loc="left", fontsize=9, color=LIGHT.muted)
    return save_figure(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, "runs/controls", rows="forgetting.json")
    parser.add_argument("--base", type=Path, help="that of benchmarks.controls (default: none)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated names (default: all of them)")
    parser.add_argument("--picture", type=Path, help="file of the picture (default: none)")
    o = parser.parse_args(argv)
    chosen = o.variants.split(",")
    if unknown := [name for name in chosen if name not in VARIANTS]:
        parser.error(f"--variants names {unknown[0]!r}; use some of {', '.join(VARIANTS)}")
    folder, base = o.workdir.absolute(), o.base and o.base.absolute()
    try:
        file = o.rows or folder / "forgetting.json"
        rows = complete_rows(file, o.seeds, chosen, lambda *run: measure(folder, o.size, base, *run))
        measured = summarize(rows)
    except UserError as error:
        parser.error(str(error))
    if o.picture:
        draw(measured, o.picture)
    print(table(measured))
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
