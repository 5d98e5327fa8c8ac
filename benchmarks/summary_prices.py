"""What shorter summaries cost: `python -m benchmarks.summary_prices [--seeds=0,1] [--picture=docs/summary_prices.png]`.

RL of configs/tiny.py at several prices of summary tokens (rl.reward.weight), and two policies without RL: "before",
which RL starts from and whose summaries are as long, and "prompted", which was taught long reports only and is asked
for them. All of them play the chains that benchmarks.controls plays, in the folders of that benchmark (the same
--workdir, so that none is trained twice). The compaction error is pass@1 of the chains played without summaries minus
pass@1 of the same chains with them. A stopped run is continued, and a finished one is a row of --rows.

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
from composer_jax.stages.controls import POLICIES, final_suites

CONTROLS: Mapping[str, str] = {"prompted": "prompted_summaries", "before": "sft", "0": "rl_price_0", "0.1": "rl"}
"""Policy -> the control of benchmarks.controls that it is."""
PRICES = ("0", "0.1", "0.3", "0.5")
"""rl.reward.weight; at 0.56 an episode that is solved with two summaries of 13 tokens is worth nothing."""
WITHOUT_RL = ("prompted", "before")
VARIANTS = (*WITHOUT_RL, *PRICES)
LABELS = {"prompted": "prompted for reports", "before": "before RL"}
WHOLE, COMPACTED = "chain_whole", "chain"


def measure(folder: Path, size: str, base: Path | None, seed: int, variant: str) -> Row:
    """Returns the row of a policy: seed, variant, tokens per summary, and what was solved in both suites."""
    runs = Seed(folder, size, seed, base)
    if control := CONTROLS.get(variant):
        workdir = runs.makers[control](control)
    else:
        sft = runs.start() / "checkpoints" / "sft"
        workdir = runs.run(f"rl_price_{variant}", base=sft, **RL, rl__reward__weight=float(variant))
    suites = final_suites(workdir, ("before",) if variant in WITHOUT_RL else POLICIES)
    solved = {name: suites[name]["solved"] for name in (WHOLE, COMPACTED)}
    return {"seed": seed, "variant": variant, "tokens": suites[COMPACTED]["tokens_per_summary"], "solved": solved}


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
        whole, compacted = (_rates(runs, seeds, suite) for suite in (WHOLE, COMPACTED))
        if whole.keys() != compacted.keys():
            raise UserError(f"{name!r} played other chains with summaries than without; delete its rows and run again.")
        out[name] = {
            "tokens": round(statistics.fmean(runs[seed]["tokens"] for seed in seeds), 2),
            "compaction_error": _with_interval([whole[task] - compacted[task] for task in sorted(whole)]),
            "pass_at_1": _with_interval([compacted[task] for task in sorted(compacted)]),
        }
    return out


def _rates(runs: Mapping[int, Row], seeds: Sequence[int], suite: str) -> dict[tuple[int, str], float]:
    return {(seed, task): rate for seed in seeds for task, rate in runs[seed]["solved"][suite].items()}


def _with_interval(values: Sequence[float]) -> list[float]:
    return [round(number, 4) for number in (statistics.fmean(values), *interval(values))]


def draw(measured: Mapping[str, Any], path: Path) -> Path:
    """Draws the compaction error of every policy against the length of its summaries."""
    figure, (ax,) = new_figure(LIGHT, 4.6, 2.8)
    for name in (name for name in VARIANTS if name in measured):
        tokens, (error, low, high) = measured[name]["tokens"], measured[name]["compaction_error"]
        color = LIGHT.muted if name in WITHOUT_RL else LIGHT.palette[0]
        ax.errorbar(tokens, error, [[error - low], [high - error]], fmt="o", color=color, capsize=3, markersize=5)
        label = LABELS.get(name, f"price {name}")
        ax.annotate(label, (tokens, error), xytext=(6, 3), textcoords="offset points", color=color, fontsize=8.5)
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
