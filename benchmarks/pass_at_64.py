"""Does RL solve what many samples of the policy before it do not? `python -m benchmarks.pass_at_64 [--seeds=0,1,2]`

The policies of benchmarks/controls.py (the same --workdir, so that none is trained twice) play tasks with three bugs
many times: the policy before RL 128 times, the others 64 times. A stopped run is continued, and a finished one is a row
of --rows.

A task counts as never solved if 64 samples of the policy before RL fail. All 128 of its samples are used: a task that
s of them solve is never solved by a random half of them with probability C(128 - s, 64) / C(128, 64), and in that case
the other half are the second 64 samples. So no split of the samples is a matter of luck.

Prints progress on stderr and, as the last line of stdout, one JSON object: suite -> {"seeds", "tasks" (over all seeds),
"pass_at_k": policy -> {k: [pass@k, low, high]} for k = 1, 2, 4 to 64 (Chen et al. 2021, arXiv 2107.03374; 95 % interval
over the tasks), "never_solved" (expected number of tasks), "solves": policy -> fraction of those that 64 of its samples
solve at least once, for "sft" a second 64 samples, "gain": policy -> {"difference", "low", "high"}: how many tasks more
than the second 64 samples it solves, as a fraction of all tasks, with its 95 % interval over the tasks}.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.controls import Seed
from benchmarks.seeded_runs import Row, complete_rows, make_parser, run_pipeline
from composer_jax.errors import UserError
from composer_jax.evals.interval import interval
from composer_jax.evals.suite import pass_at_k
from composer_jax.stages.controls import final_suites
from configs.tiny import get_config

SFT, RL, RFT = "sft", "rl", "rft"
SAMPLES = {"full": 64, "smoke": 2}
"""Size of configs/tiny.py -> attempts at a task; SFT has twice as many."""
SUITES = ("three_bugs",)
"""Suites that the policy before RL solves rarely. Half of the tasks with two bugs are solved by 8 samples already."""


def measure(folder: Path, size: str, base: Path | None, seed: int, variant: str) -> Row:
    """Returns the row of a policy: seed, variant, and suite -> {"attempts", "solved": task -> fraction of attempts}."""
    runs = Seed(folder, size, seed, base)
    trained = runs.makers[variant](variant) / "checkpoints" / ("sft" if variant == SFT else "rl")
    attempts = SAMPLES[size] * (2 if variant == SFT else 1)
    fields: dict[str, Any] = {}
    config: Any = get_config(size)  # a ConfigDict types its sections as plain values
    for name in config.evaluate.suites:
        if name in SUITES:
            fields[f"evaluate__suites__{name}__attempts"] = attempts
        else:
            fields |= {f"evaluate__suites__{name}__{field}": 1 for field in ("tasks", "attempts")}
    workdir = runs.folder / f"pass_at_64_{variant}"
    run_pipeline(workdir, size, seed, base=trained, stages="()", evaluate__which="('before',)", **fields)
    suites = final_suites(workdir)
    return {
        "seed": seed,
        "variant": variant,
        "suites": {name: {"attempts": attempts, "solved": suites[name]["solved"]} for name in SUITES},
    }


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the printed object, over the seeds that have the policy before RL and every other policy of the rows."""
    variants = sorted({row["variant"] for row in rows})
    by_variant = {name: {row["seed"]: row for row in rows if row["variant"] == name} for name in variants}
    seeds = sorted(set.intersection(*(set(runs) for runs in by_variant.values()))) if by_variant else []
    if SFT not in by_variant or not seeds:
        return {}
    names = by_variant[SFT][seeds[0]]["suites"]
    return {name: _summarize_suite(name, by_variant, seeds) for name in names}


def _summarize_suite(suite: str, by_variant: Mapping[str, Mapping[int, Row]], seeds: Sequence[int]) -> dict[str, Any]:
    counts: dict[str, dict[tuple[int, str], tuple[int, int]]] = {}  # policy -> task -> (attempts, solved)
    for name, runs in by_variant.items():
        measures = {seed: runs[seed]["suites"][suite] for seed in seeds}
        counts[name] = {
            (seed, task): (m["attempts"], round(rate * m["attempts"]))
            for seed, m in measures.items()
            for task, rate in m["solved"].items()
        }
    tasks = sorted(counts[SFT])
    k = counts[SFT][tasks[0]][0] // 2
    # The chance that k of the samples before RL fail, and that the other k do as well.
    unsolved = {task: 1 - pass_at_k(n, solved, k) for task, (n, solved) in counts[SFT].items()}
    again = {task: unsolved[task] - (counts[SFT][task][1] == 0) for task in tasks}
    reached = {
        name: again if name == SFT else {task: unsolved[task] * pass_at_k(*counts[name][task], k) for task in tasks}
        for name in by_variant
    }
    total = math.fsum(unsolved.values())
    gains = {name: [reached[name][task] - again[task] for task in tasks] for name in by_variant if name != SFT}
    return {
        "seeds": list(seeds),
        "tasks": len(tasks),
        "pass_at_k": {name: _curve(solved.values(), k) for name, solved in counts.items()},
        "never_solved": total,
        "solves": {name: math.fsum(of.values()) / total if total else None for name, of in reached.items()},
        "gain": {
            name: dict(zip(("difference", "low", "high"), (sum(d) / len(d), *interval(d)), strict=True))
            for name, d in gains.items()
        },
    }


def _curve(counts: Any, largest: int) -> dict[str, list[float]]:
    """Returns k -> [pass@k, low, high] for the powers of two up to `largest`."""
    ks = [1 << i for i in range(largest.bit_length()) if 1 << i <= largest]
    estimates = {k: [pass_at_k(n, solved, k) for n, solved in counts] for k in ks}
    return {str(k): [sum(of) / len(of), *interval(of)] for k, of in estimates.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, "runs/controls", rows="pass_at_64.json")
    parser.add_argument("--base", type=Path, help="that of benchmarks.controls (default: none)")
    parser.add_argument("--policies", default=f"{SFT},{RL},{RFT}", help="some of sft, rl, rft (default: all)")
    o = parser.parse_args(argv)
    chosen = o.policies.split(",")
    if unknown := [name for name in chosen if name not in (SFT, RL, RFT)]:
        parser.error(f"--policies names {unknown[0]!r}; use some of {SFT}, {RL}, {RFT}")
    if SFT not in chosen:
        parser.error(f"--policies={o.policies} lacks {SFT}, whose samples say which tasks are never solved; add it")
    folder = o.workdir.absolute()
    file = o.rows or folder / "pass_at_64.json"
    base = o.base and o.base.absolute()
    try:
        rows = complete_rows(file, o.seeds, chosen, lambda *run: measure(folder, o.size, base, *run))
        print(json.dumps(summarize(rows)))
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
