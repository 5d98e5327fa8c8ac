"""What shorter summaries cost: `python -m benchmarks.summary_prices [--seeds=0,1] [--picture=docs/summary_prices.png]`.

A policy that writes reports of all items of a chain is trained by RL at several prices of summary tokens
(rl.reward.weight; summary_prices_config.py). It is compared with the policies of benchmarks.controls that play the
same chains, in the folders of that benchmark (the same --workdir, so that none is trained twice). The compaction error
is pass@1 of the chains played without summaries minus pass@1 of the same chains with them. A stopped run is continued,
and a finished one is a row of --rows.

    before, before_short    the policy before RL, asked for reports and for short summaries
    prompted                the control prompted_summaries: SFT has taught it reports only
    short                   the control rl_price_0: RL of summaries that have room for one item, without a price
    0, 0.01, 0.03, 0.1      RL of reports at these prices

Prints progress on stderr and, as the last line of stdout, one JSON object: "seeds", and policy -> {"tokens": tokens per
summary, mean over the seeds, "compaction_error", "pass_at_1": [mean, low, high], the 95 % interval over the tasks of
all seeds}. With --picture=FILE it draws the error against the tokens.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.controls import RL, Seed
from benchmarks.seeded_runs import Row, complete_rows, make_parser
from composer_jax.errors import UserError
from composer_jax.evals.interval import interval
from composer_jax.observe.picture import LIGHT, new_figure, percent_y_axis, save_figure
from composer_jax.stages.controls import final_suites

CONFIG = "benchmarks/summary_prices_config.py"
WHOLE, REPORTS, SHORT = "chain_whole", "chain_long", "chain"
CONTROLS: Mapping[str, tuple[str, str]] = {
    "before": ("sft", REPORTS),
    "before_short": ("sft", SHORT),
    "prompted": ("prompted_summaries", REPORTS),
    "short": ("rl_price_0", SHORT),
}
"""Policy -> its control of benchmarks.controls, and the suite that it plays with summaries."""
WITHOUT_RL = ("before", "before_short", "prompted")
PRICES = ("0", "0.01", "0.03", "0.1")
"""rl.reward.weight."""
VARIANTS = (*CONTROLS, *PRICES)
LABELS = {
    "before": "before RL",
    "before_short": "before RL, short",
    "prompted": "prompted",
    "short": "RL, short",
}


def measure(folder: Path, size: str, base: Path | None, seed: int, variant: str) -> Row:
    """Returns the row of a policy: seed, variant, tokens per summary, and what it solved without summaries ("whole")
    and with them ("compacted"), by task."""
    runs = Seed(folder, size, seed, base)
    if variant in CONTROLS:
        control, suite = CONTROLS[variant]
        workdir = runs.makers[control](control)
    else:
        suite, sft = REPORTS, runs.start() / "checkpoints" / "sft"
        fields = {"base": sft, "config": CONFIG, "rl__reward__weight": float(variant), **RL}
        workdir = runs.run(f"rl_reports_price_{variant}", **fields)
    suites = final_suites(workdir, ("before",) if variant in WITHOUT_RL else ("after",))
    return {
        "seed": seed,
        "variant": variant,
        "tokens": suites[suite]["tokens_per_summary"],
        "whole": suites[WHOLE]["solved"],
        "compacted": suites[suite]["solved"],
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
    """Draws the compaction error of every policy against the length of its summaries; equal places share a label."""
    figure, (ax,) = new_figure(LIGHT, 4.6, 2.8)
    names = [name for name in VARIANTS if name in measured]
    labels: dict[tuple[int, float], list[str]] = {}
    for name in names:
        tokens, (error, low, high) = measured[name]["tokens"], measured[name]["compaction_error"]
        color = LIGHT.muted if name in WITHOUT_RL else LIGHT.palette[0]
        ax.errorbar(tokens, error, [[error - low], [high - error]], fmt="o", color=color, capsize=3, markersize=5)
        labels.setdefault((round(tokens), round(error, 1)), []).append(name)
    longest = max(measured[name]["tokens"] for name in names)
    ax.set_xlim(0, 1.1 * longest)
    for here in labels.values():
        tokens, error = measured[here[0]]["tokens"], measured[here[0]]["compaction_error"][0]
        prices = [name for name in here if name in PRICES]
        words = [LABELS[name] for name in here if name in LABELS]
        words += [f"RL, price {', '.join(prices)}"] if prices else []
        side = -1 if tokens > longest / 2 else 1
        ax.annotate(
            "; ".join(words),
            (tokens, error),
            xytext=(8 * side, 4),
            textcoords="offset points",
            ha="left" if side > 0 else "right",
            color=LIGHT.muted if set(here) <= set(WITHOUT_RL) else LIGHT.palette[0],
            fontsize=8.5,
        )
    percent_y_axis(ax)
    ax.set_xlabel("tokens per summary", fontsize=9, color=LIGHT.muted)
    ax.set_title("compaction error of chains", loc="left", fontsize=9, color=LIGHT.muted)
    return save_figure(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, "runs/controls", rows="summary_prices.json")
    parser.add_argument("--base", type=Path, help="that of benchmarks.controls (default: none)")
    parser.add_argument("--policies", default=",".join(VARIANTS), help=f"some of {', '.join(VARIANTS)} (default: all)")
    parser.add_argument("--picture", type=Path, help="file of the picture (default: none)")
    o = parser.parse_args(argv)
    chosen = o.policies.split(",")
    if unknown := [name for name in chosen if name not in VARIANTS]:
        parser.error(f"--policies names {unknown[0]!r}; use some of {', '.join(VARIANTS)}")
    folder, base = o.workdir.absolute(), o.base and o.base.absolute()
    file = o.rows or folder / "summary_prices.json"
    try:
        rows = complete_rows(file, o.seeds, chosen, lambda *run: measure(folder, o.size, base, *run))
        measured = summarize(rows)
    except UserError as error:
        parser.error(str(error))
    if o.picture and measured["seeds"]:
        draw(measured, o.picture)
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
