"""Does a price of messages teach parallel calls? `python -m benchmarks.parallel_calls [--seeds=0,1,2]`.

Composer 2 (arXiv 2603.24477, section 4.2) has a length cost that bends down, and reports calls side by side as its
effect. Here an agent reads two or four files that do not depend on each other (demo/lookups.py). For every seed,
benchmarks/parallel_calls_config.py is fine-tuned once on an expert that reads side by side as often as one by one, and
RL goes on from there with a price of messages and without (VARIANTS). Two further runs have a hundredth of the price,
the second one with advantages that are divided by the standard deviation of their group, as in GRPO (arXiv 2402.03300).
Dr. GRPO (arXiv 2503.20783) says that this inflates small differences: then the hundredth would count like the price.
A stopped run is continued. A finished one is a row of --rows and does not run again; docs/data/parallel_calls.json has
the rows of docs/results.md.

Prints progress on stderr and, as the last line of stdout, one JSON object:
    sft, free, priced, tiny_price, tiny_price_std   suite -> {"pass_at_1", "calls_per_turn", "turns", "tokens"}, means
                        over the seeds: before RL, and after RL without the price, with it, and with a hundredth of it
    rise                suite -> calls per turn with the price over those without, minus 1, for each seed
    rise_by_std         the same of the runs with a hundredth of the price, of which one divides by the deviation
    shortening          suite -> fraction of the messages that the price saves, for each seed
    pass_difference     suite -> pass@1 with the price minus that without, paired by task, with its 95 % interval
    pass_difference_by_std      the same of the runs with a hundredth of the price: with the division minus without
    seeds               the seeds that all variants were run with, in the order of the lists
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.parallel_calls_config import PRICE
from benchmarks.seeded_runs import Row, complete_rows, make_parser, run_pipeline, runs_of_common_seeds
from composer_jax.demo.lookups import LOOKUPS
from composer_jax.stages.controls import compare_by_task, final_suites

CONFIG = "benchmarks/parallel_calls_config.py"
SFT, FREE, PRICED, TINY, TINY_STD = "sft", "free", "priced", "tiny_price", "tiny_price_std"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    SFT: {},
    FREE: {"rl__reward__weight": 0.0},
    PRICED: {},
    TINY: {"rl__reward__weight": PRICE / 100},
    TINY_STD: {"rl__reward__weight": PRICE / 100, "rl__algorithm__options__divide_by_std": True},
}
"""Name -> fields of the config that it sets."""
MEASURES = ("pass_at_1", "calls_per_turn", "turns", "tokens")
Runs = Mapping[str, Mapping[int, Row]]
"""Variant -> seed -> its row."""


def measure(folder: Path, size: str, seed: int, variant: str) -> Row:
    """Returns the row of one run: seed, variant, and the measures of the suites. SFT runs first if it is not there."""
    base = workdir = folder / f"seed{seed}" / SFT
    run_pipeline(base, size, seed, config=CONFIG, stages="('sft',)", evaluate__which="('before',)")
    if variant != SFT:
        workdir = folder / f"seed{seed}" / variant
        start = {"base": base / "checkpoints" / "sft", "stages": "('rl',)", "evaluate__which": "('after',)"}
        run_pipeline(workdir, size, seed, config=CONFIG, **start, **VARIANTS[variant])
    suites = final_suites(workdir)
    return {
        "seed": seed,
        "variant": variant,
        "suites": {name: {key: suites[name][key] for key in (*MEASURES, "solved")} for name in LOOKUPS},
    }


def ratios(runs: Runs, suite: str, measure: str, of: str = PRICED, to: str = FREE) -> list[float]:
    """Returns a measure of one variant over that of another, for each seed; 1 where the other one has 0.

    A policy of the smoke size makes no calls.
    """
    pairs = [[runs[name][seed]["suites"][suite][measure] for name in (of, to)] for seed in runs[SFT]]
    return [mine / other if other else 1.0 for mine, other in pairs]


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the printed object."""
    runs = runs_of_common_seeds(rows, tuple(VARIANTS))
    seeds = list(runs[SFT])
    if not seeds:
        return {"seeds": []}

    def mean(variant: str, suite: str, measure: str) -> float:
        return round(statistics.fmean(row["suites"][suite][measure] for row in runs[variant].values()), 4)

    def solved(variant: str, suite: str) -> dict[str, Any]:
        return {str(seed): row["suites"][suite] for seed, row in runs[variant].items()}

    return {
        **{v: {suite: {key: mean(v, suite, key) for key in MEASURES} for suite in LOOKUPS} for v in VARIANTS},
        "rise": {suite: [round(r - 1, 4) for r in ratios(runs, suite, "calls_per_turn")] for suite in LOOKUPS},
        "rise_by_std": {
            suite: [round(r - 1, 4) for r in ratios(runs, suite, "calls_per_turn", TINY_STD, TINY)] for suite in LOOKUPS
        },
        "shortening": {suite: [round(1 - r, 4) for r in ratios(runs, suite, "turns")] for suite in LOOKUPS},
        "pass_difference": {
            suite: compare_by_task(solved(PRICED, suite), solved(FREE, suite), FREE) for suite in LOOKUPS
        },
        "pass_difference_by_std": {
            suite: compare_by_task(solved(TINY_STD, suite), solved(TINY, suite), TINY) for suite in LOOKUPS
        },
        "seeds": seeds,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, "runs/parallel_calls", CONFIG)
    o = parser.parse_args(argv)
    folder = o.workdir.absolute()
    file = o.rows or folder / "rows.json"
    rows = complete_rows(file, o.seeds, tuple(VARIANTS), lambda *run: measure(folder, o.size, *run))
    print(json.dumps(summarize(rows)))


if __name__ == "__main__":
    main()
