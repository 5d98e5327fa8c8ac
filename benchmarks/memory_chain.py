"""RL with and without its summaries in the loss: `python -m benchmarks.memory_chain [--seeds=0,1,2]`.

A fact of step 1 is needed at the end of a chain of steps, with three summaries in between (demo/memory_chain.py). For
every seed, configs/memory_chain.py is fine-tuned once, and RL goes on from there in two runs that differ in whether
summaries have a loss (VARIANTS). A stopped run is continued. A finished one is a row of --rows and does not run again;
docs/data/memory_chain.json has the rows that docs/results.md shows.

Prints progress on stderr and, as the last line of stdout, one JSON object:
    joint, frozen, sft      held-out pass rate of each seed: after RL with the summaries in the loss, after the same RL
                            without them, and before RL
    minutes                 of the slowest seed: SFT, both runs of RL and all evaluations
    chance                  pass rate of an agent that carries the chain through and guesses the fact
    facts_kept, facts_kept_last     variant -> fraction of episodes, over all seeds, whose first and whose last summary
                            holds the fact
    seeds                   the seeds that all variants were run with, in the order of the lists
"""

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.seeded_runs import Row, complete_rows, curves, make_parser, run_pipeline
from composer_jax.demo.memory_chain import CHANCE
from composer_jax.stages.controls import final_suites

CONFIG = "configs/memory_chain.py"
VARIANTS: Mapping[str, str] = {"joint": "short", "frozen": "untrained"}
"""Name -> compaction of the config's agent.compactions that RL plays with."""
SFT = "sft"
"""The variant that is the policy before RL."""
CURVES = ("grade", "facts_kept", "facts_kept_last", "finished", "entropy", "step_s")
"""Columns of metrics/rl.jsonl."""
MEASURES = ("pass_at_1", "low", "high", "facts_kept", "facts_kept_last", "tasks", "episodes", "outcomes")
"""Measures of the suite that a row has."""


def measure(folder: Path, size: str, seed: int, variant: str) -> Row:
    """Returns the row of one run: seed, variant, MEASURES, minutes, and the curves of CURVES.

    The policy before RL is trained first if it is not there.
    """
    base = folder / f"seed{seed}" / SFT
    started = time.monotonic()
    run_pipeline(base, size, seed, config=CONFIG, stages="('sft',)", evaluate__which="('before',)")
    workdir = base
    if variant != SFT:
        workdir, started = folder / f"seed{seed}" / variant, time.monotonic()
        start = {"base": base / "checkpoints" / "sft", "stages": "('rl',)", "evaluate__which": "('after',)"}
        run_pipeline(workdir, size, seed, config=CONFIG, rl__compaction=VARIANTS[variant], **start)
    seconds = time.monotonic() - started
    # A run that was continued took longer than its last process; its stages know how long.
    seconds = max(seconds, json.loads((workdir / "results.json").read_bytes())["wall_seconds"])
    suite = final_suites(workdir)["chain"]
    return {
        "seed": seed,
        "variant": variant,
        **{name: suite[name] for name in MEASURES},
        "minutes": round(seconds / 60, 2),
        "curves": curves(workdir / "metrics" / "rl.jsonl", CURVES),
    }


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the printed object; seeds that lack a variant are left out."""
    by_variant = {name: {r["seed"]: r for r in rows if r["variant"] == name} for name in (*VARIANTS, SFT)}
    seeds = sorted(set.intersection(*(set(runs) for runs in by_variant.values())))
    minutes = [sum(runs[seed]["minutes"] for runs in by_variant.values()) for seed in seeds]

    def mean(variant: str, name: str) -> float | None:
        return round(statistics.fmean(by_variant[variant][seed][name] for seed in seeds), 4) if seeds else None

    return {
        **{name: [round(runs[seed]["pass_at_1"], 4) for seed in seeds] for name, runs in by_variant.items()},
        "minutes": round(max(minutes), 1) if minutes else None,
        "chance": CHANCE,
        **{key: {name: mean(name, key) for name in by_variant} for key in ("facts_kept", "facts_kept_last")},
        "seeds": seeds,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, "runs/memory_chain", CONFIG)
    o = parser.parse_args(argv)
    folder = o.workdir.absolute()
    variants = (SFT, *VARIANTS)
    file = o.rows or folder / "rows.json"
    print(json.dumps(summarize(complete_rows(file, o.seeds, variants, lambda *run: measure(folder, o.size, *run)))))


if __name__ == "__main__":
    main()
