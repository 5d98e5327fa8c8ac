"""RL on a ladder against RL on a fixed mix of its rungs: `python -m benchmarks.ladder [--seeds=0,1,2]`.

For every seed, RL starts from one SFT policy in two runs with equally many steps and groups (CONFIGS). "ladder" is
configs/tiny.py: it draws from tasks with one bug at first, and from those with more bugs as its grade grows
(rl.curriculum.ladders). "fixed" draws from all of them in equal parts in every step. A stopped run is continued. A
finished one is a row of --rows and does not run again. --base takes the SFT policies from the folder of another
benchmark, such as runs/controls, instead of training them.

Prints progress on stderr and, as the last line of stdout, one JSON object:
    suites      suite -> {"fixed", "ladder": {"pass_at_1", "low", "high"}, the rate on held-out tasks with its 95 %
                interval over the tasks of all seeds, "ladder_minus_fixed": the difference, paired by task, with its
                interval}
    rung        of each seed: the mean rung of the ladder over each tenth of the run; 1 is one_bug
    seeds       the seeds that both variants were run with, in the order of `rung`
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.seeded_runs import Row, complete_rows, curves, make_parser, run_pipeline
from composer_jax.evals.interval import interval
from composer_jax.stages.controls import compare_by_task, final_suites

CONFIGS: Mapping[str, str] = {"fixed": "benchmarks/fixed_mix_config.py", "ladder": "configs/tiny.py"}
"""Variant -> its config."""
SUITES = ("one_bug", "two_bugs", "three_bugs")
RUNG = "rung_one_bug"
"""The column of metrics/rl.jsonl."""


def measure(folder: Path, size: str, base: Path | None, seed: int, variant: str) -> Row:
    """Returns the row of one run: seed, variant, the rung, and of every suite the rate and what was solved.

    base: holds the SFT policy of the seed; None trains it first if it is not there.
    """
    sft = sft_folder(base or folder, seed)
    if base is None:
        run_pipeline(sft, size, seed, stages="('pretrain','sft')", evaluate__which="('before',)")
    workdir = folder / f"seed{seed}" / variant
    start = {"base": sft / "checkpoints" / "sft", "stages": "('rl',)", "evaluate__which": "('after',)"}
    run_pipeline(workdir, size, seed, config=CONFIGS[variant], **start)
    suites = final_suites(workdir)
    return {
        "seed": seed,
        "variant": variant,
        "rung": curves(workdir / "metrics" / "rl.jsonl", (RUNG,))[RUNG],
        "suites": {name: {key: suites[name][key] for key in ("pass_at_1", "solved")} for name in SUITES},
    }


def sft_folder(folder: Path, seed: int) -> Path:
    """Returns the folder of the run that trains the SFT policy of a seed."""
    return folder / f"seed{seed}" / "sft"


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the printed object; seeds that lack a variant are left out."""
    by_variant = {name: {r["seed"]: r for r in rows if r["variant"] == name} for name in CONFIGS}
    seeds = sorted(set.intersection(*(set(runs) for runs in by_variant.values())))
    return {
        "suites": {name: _compare(name, by_variant, seeds) for name in SUITES if seeds},
        "rung": [by_variant["ladder"][seed]["rung"] for seed in seeds],
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
    return {**measures, "ladder_minus_fixed": compare_by_task(by_seed["ladder"], by_seed["fixed"], "fixed")}


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, "runs/ladder")
    parser.add_argument("--base", type=Path, help="folder with finished SFT runs in seedN/sft (default: trains them)")
    o = parser.parse_args(argv)
    folder, base = o.workdir.absolute(), o.base.absolute() if o.base else None
    for file in [sft_folder(base, seed) / "stages" / "sft.json" for seed in o.seeds] if base else ():
        if not file.exists():
            parser.error(
                f"--base={o.base} has no finished SFT ({file} is missing); name another folder, or leave it out"
            )
    rows = complete_rows(
        o.rows or folder / "rows.json", o.seeds, tuple(CONFIGS), lambda *run: measure(folder, o.size, base, *run)
    )
    print(json.dumps(summarize(rows)))


if __name__ == "__main__":
    main()
