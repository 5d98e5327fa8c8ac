"""RL on a ladder against RL on a fixed mix of its rungs: `python -m benchmarks.ladder [--seeds=0,1,2]`.

For every seed, RL starts from one SFT policy in two runs with equally many steps and groups. "ladder" is the run "rl"
of benchmarks.controls (the same --workdir, so that it is not trained twice): it draws from tasks with one bug at first,
and from those with more bugs as its grade grows (rl.curriculum.ladders). "fixed" draws from all of them in equal parts
in every step (fixed_mix_config.py). A stopped run is continued. A finished one is a row of --rows and does not run
again.

Prints progress on stderr and, as the last line of stdout, one JSON object:
    suites      suite -> {"fixed", "ladder": {"pass_at_1", "low", "high"}, the rate on held-out tasks with its 95 %
                interval over the tasks of all seeds, "ladder_minus_fixed": the difference, paired by task, with its
                interval}
    rung        of each seed: the mean rung of the ladder over each tenth of the run; 1 is one_bug
    seeds       the seeds that both variants were run with, in the order of `rung`
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.controls import RL, Seed, compare_variants
from benchmarks.seeded_runs import Row, curves, runs_of_common_seeds
from composer_jax.evals.interval import interval
from composer_jax.stages.controls import compare_by_task, final_suites

CONFIG = "benchmarks/fixed_mix_config.py"
LADDER, FIXED = "ladder", "fixed"
VARIANTS = (FIXED, LADDER)
SUITES = ("one_bug", "two_bugs", "three_bugs")
RUNG = "rung_one_bug"
"""The column of metrics/rl.jsonl."""


def measure(folder: Path, size: str, base: Path | None, seed: int, variant: str) -> Row:
    """Returns the row of one run: seed, variant, the rung, and of every suite the rate and what was solved.

    base: see benchmarks.controls.
    """
    runs = Seed(folder, size, seed, base)
    if variant == LADDER:
        workdir = runs.makers["rl"]("rl")
    else:
        workdir = runs.run("rl_fixed_mix", base=runs.start() / "checkpoints" / "sft", config=CONFIG, **RL)
    suites = final_suites(workdir)
    return {
        "seed": seed,
        "variant": variant,
        "rung": curves(workdir / "metrics" / "rl.jsonl", (RUNG,))[RUNG],
        "suites": {name: {key: suites[name][key] for key in ("pass_at_1", "solved")} for name in SUITES},
    }


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the printed object; seeds that lack a variant are left out."""
    by_variant = runs_of_common_seeds(rows, VARIANTS)
    seeds = list(by_variant[LADDER])
    return {
        "suites": {name: _compare(name, by_variant, seeds) for name in SUITES if seeds},
        "rung": [by_variant[LADDER][seed]["rung"] for seed in seeds],
        "seeds": seeds,
    }


def _compare(suite: str, by_variant: Mapping[str, Mapping[int, Row]], seeds: Sequence[int]) -> dict[str, Any]:
    """Returns the measures of a suite over the seeds."""
    by_seed = {name: {str(seed): runs[seed]["suites"][suite] for seed in seeds} for name, runs in by_variant.items()}
    measures = {}
    for name, suites in by_seed.items():
        rates = [rate for measured in suites.values() for rate in measured["solved"].values()]
        low, high = interval(rates)
        measures[name] = {"pass_at_1": statistics.fmean(rates), "low": low, "high": high}
    return {**measures, "ladder_minus_fixed": compare_by_task(by_seed[LADDER], by_seed[FIXED], FIXED)}


def main(argv: Sequence[str] | None = None) -> None:
    compare_variants(argv, __doc__, "ladder.json", VARIANTS, measure, summarize)


if __name__ == "__main__":
    main()
