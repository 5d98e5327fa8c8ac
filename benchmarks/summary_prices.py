"""What shorter summaries cost: `python -m benchmarks.summary_prices [--seeds=0,1,2] [--picture=FILE]`.

Chains ask for any of five items at their end, and an item that a summary drops is lost, so that every item has its
worth and its tokens. SFT teaches summaries with any number of items ("before"; summary_prices_config.py). From there
RL plays the same chains at four prices of summary tokens (rl.reward.weight). The compaction error is pass@1 of
held-out chains played without summaries minus pass@1 of the same chains with them. A stopped run is continued, and a
finished one is a row of --rows.

Prints progress on stderr and, as the last line of stdout, one JSON object: "seeds", and "before" and every price ->
{"tokens": tokens per summary, mean over the seeds, "compaction_error", "pass_at_1": [mean, low, high], the 95 %
interval over the tasks of all seeds}. With --picture=FILE it draws the error against the tokens.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.seeded_runs import Row, complete_rows, make_parser, run_pipeline
from benchmarks.summary_prices_config import SUMMARIZED, WHOLE
from composer_jax.errors import UserError
from composer_jax.evals.interval import interval
from composer_jax.observe.picture import LIGHT, new_figure, percent_y_axis, save_figure
from composer_jax.stages.controls import final_suites

CONFIG = "benchmarks/summary_prices_config.py"
BEFORE = "before"
PRICES = ("0", "0.1", "0.2", "0.3")
"""rl.reward.weight. A chain that is solved with every item kept takes about 75 tokens of summaries and costs 0.38 at
0.1. At 0.2 and 0.3 costs bend (rewards.py: bounded_cost): it pays 0.63 and 0.68 of its grade."""
VARIANTS = (BEFORE, *PRICES)


def measure(folder: Path, size: str, seed: int, variant: str) -> Row:
    """Returns the row of a policy: seed, variant, tokens per summary, and what it solved without summaries ("whole")
    and with them ("compacted"), by task. The policy before RL is trained first if it is not there."""
    workdir = sft = folder / f"seed{seed}" / BEFORE
    run_pipeline(sft, size, seed, config=CONFIG, stages="('sft',)", evaluate__which="('before',)")
    if variant != BEFORE:
        workdir = folder / f"seed{seed}" / f"price_{variant}"
        start = {"base": sft / "checkpoints" / "sft", "stages": "('rl',)", "evaluate__which": "('after',)"}
        run_pipeline(workdir, size, seed, config=CONFIG, **start, rl__reward__weight=float(variant))
    suites = final_suites(workdir)
    return {
        "seed": seed,
        "variant": variant,
        "tokens": suites[SUMMARIZED]["tokens_per_summary"],
        "whole": suites[WHOLE]["solved"],
        "compacted": suites[SUMMARIZED]["solved"],
    }


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the printed object, over the seeds that all policies of the rows have.

    Raises:
      UserError: a policy played other chains with summaries than without.
    """
    by_variant = {name: {row["seed"]: row for row in rows if row["variant"] == name} for name in VARIANTS}
    by_variant = {name: runs for name, runs in by_variant.items() if runs}
    seeds = sorted(set.intersection(*(set(runs) for runs in by_variant.values()))) if by_variant else []
    out: dict[str, Any] = {"seeds": seeds}
    for name, runs in by_variant.items() if seeds else ():
        whole, compacted = (_rates(runs, seeds, measure) for measure in ("whole", "compacted"))
        if whole.keys() != compacted.keys():
            raise UserError(f"{name!r} played other chains with summaries than without; delete its rows and run again.")
        out[name] = {
            "tokens": round(statistics.fmean(runs[seed]["tokens"] for seed in seeds), 2),
            "compaction_error": _with_interval([whole[task] - compacted[task] for task in sorted(whole)]),
            "pass_at_1": _with_interval([compacted[task] for task in sorted(compacted)]),
        }
    return out


def _rates(runs: Mapping[int, Row], seeds: Sequence[int], measure: str) -> dict[tuple[int, str], float]:
    return {(seed, task): rate for seed in seeds for task, rate in runs[seed][measure].items()}


def _with_interval(values: Sequence[float]) -> list[float]:
    return [round(number, 4) for number in (statistics.fmean(values), *interval(values))]


def draw(measured: Mapping[str, Any], path: Path) -> Path:
    """Draws the compaction error of every policy against the length of its summaries."""
    figure, (ax,) = new_figure(LIGHT, 4.6, 2.8)
    names = [name for name in VARIANTS if name in measured]
    for name in names:
        tokens, (error, low, high) = measured[name]["tokens"], measured[name]["compaction_error"]
        color = LIGHT.muted if name == BEFORE else LIGHT.palette[0]
        ax.errorbar(tokens, error, [[error - low], [high - error]], fmt="o", color=color, capsize=3, markersize=5)
        # To the left of a point that has a close one on its right.
        is_crowded = any(0 < measured[other]["tokens"] - tokens < 2 for other in names)
        ax.annotate(
            "before RL" if name == BEFORE else f"price {name}",
            (tokens, error),
            xytext=(-8 if is_crowded else 8, 3),
            textcoords="offset points",
            ha="right" if is_crowded else "left",
            color=color,
            fontsize=8.5,
        )
    ax.set_xlim(0, 1.3 * max(measured[name]["tokens"] for name in names))
    percent_y_axis(ax)
    ax.set_xlabel("tokens per summary", fontsize=9, color=LIGHT.muted)
    ax.set_title("compaction error of chains", loc="left", fontsize=9, color=LIGHT.muted)
    return save_figure(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, "runs/summary_prices", CONFIG)
    parser.add_argument("--picture", type=Path, help="file of the picture (default: none)")
    o = parser.parse_args(argv)
    folder = o.workdir.absolute()
    try:
        file = o.rows or folder / "rows.json"
        rows = complete_rows(file, o.seeds, VARIANTS, lambda *run: measure(folder, o.size, *run))
        measured = summarize(rows)
    except UserError as error:
        parser.error(str(error))
    if o.picture and measured["seeds"]:
        draw(measured, o.picture)
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
