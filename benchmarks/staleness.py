"""Asynchronous RL against synchronous on the demo: `python -m benchmarks.staleness [--seeds=0,1,2] [--variants=...]`.

For every seed, configs/tiny.py is pretrained and fine-tuned once, and RL goes on from there in one run per variant
(VARIANTS): they differ in rl.max_staleness and the trust region alone. All of them play the same tasks with the same
number of steps and episodes. A stopped run is continued. A finished one is a row of --rows and does not run again;
docs/data/staleness.json has the rows that docs/results.md shows. --base takes the policies before RL from another
folder, such as that of benchmarks.controls, instead of training them.

Prints progress on stderr and, as the last line of stdout, one JSON object:
    pass_at_1     variant -> suite -> mean over the seeds; the variant "sft" is the policy before RL
    differences   variant -> suite -> {"difference", "low", "high", "tasks"}: pass@1 minus that of --reference with
                  the 95 % interval over the tasks of all seeds, paired by task
    curves        variant -> means over the seeds of CURVES, one number per tenth of the run
    seeds         variant -> the seeds that were run
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.controls import RL, Seed
from benchmarks.seeded_runs import Row, complete_rows, curves, make_parser, run_pipeline
from composer_jax.errors import UserError
from composer_jax.stages.controls import POLICIES, compare_by_task, final_suites

PPO: Mapping[str, Any] = {"loss.dual_clip": "inf"}
"""Without a bound on the ratios of negative advantages."""
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "synchronous": {"max_staleness": 0, **PPO},
    "staleness_4": {"max_staleness": 4, **PPO},
    "staleness_3": {"max_staleness": 3, **PPO},
    "staleness_3_dual_clip": {"max_staleness": 3},
    # No ratio is below 0 or above a million, so that no token is left out: importance-weighted REINFORCE.
    "staleness_3_unbounded": {"max_staleness": 3, "loss.ratio_low": 1.0, "loss.ratio_high": 1e6, **PPO},
}
"""Name -> fields of the rl section. Only staleness_3_dual_clip has the default rl.loss.dual_clip."""
CURVES = (
    "reward",
    "grade",
    "staleness_max",
    "ratio_max",
    "out_of_region",
    "dual_clipped",
    "sampler_kl",
    "entropy",
    "step_s",
)
"""Columns of metrics/rl.jsonl. Rows of earlier versions lack dual_clipped."""


def measure(
    folder: Path, size: str, seed: int, variant: str, steps: int | None = None, base: Path | None = None
) -> Row:
    """Returns the row of one run: seed, variant, suites (pass@1 and the solved fraction of every task), curves.

    Args:
      steps: of RL; None: those of the config.
      base: holds the run whose policy before RL is that of the seed, as base/seedN/sft; None trains one if it is not
        in `folder`.

    Raises:
      UserError: the run in `base` has no policy that was evaluated before RL.
    """
    start = workdir = Seed(folder, size, seed, base).start()
    if variant != "sft":
        workdir = folder / f"seed{seed}" / _with_steps(variant, steps)
        fields: dict[str, Any] = {f"rl__{name.replace('.', '__')}": value for name, value in VARIANTS[variant].items()}
        if steps is not None:
            fields["rl__steps"] = steps
        run_pipeline(workdir, size, seed, base=start / "checkpoints" / "sft", **RL, **fields)
    kept = ("pass_at_1", "solved", "tokens_per_summary", "compaction_error")
    suites = {
        name: {key: measures[key] for key in kept if key in measures}
        for name, measures in final_suites(workdir, ("before",) if variant == "sft" else POLICIES).items()
    }
    return {
        "seed": seed,
        "variant": variant,
        "suites": suites,
        "curves": curves(workdir / "metrics" / "rl.jsonl", CURVES),
    }


def _with_steps(name: str, steps: int | None) -> str:
    """Returns the name of what belongs to runs of so many steps, which are not compared with those of the config."""
    return name if steps is None else f"{name}_{steps}_steps"


def summarize(rows: Sequence[Row], reference: str = "synchronous") -> dict[str, Any]:
    """Returns the printed object. A difference to the reference is over the seeds that both variants have."""
    by_variant: dict[str, dict[int, Row]] = {}
    for row in rows:
        by_variant.setdefault(row["variant"], {})[row["seed"]] = row
    references = by_variant.get(reference, {})

    def solved(runs: Mapping[int, Row], name: str, seeds: Sequence[int]) -> dict[str, Any]:
        return {str(seed): runs[seed]["suites"][name] for seed in seeds}

    out: dict[str, Any] = {"pass_at_1": {}, "differences": {}, "curves": {}, "seeds": {}}
    for variant, runs in by_variant.items():
        names = next(iter(runs.values()))["suites"]
        out["seeds"][variant] = sorted(runs)
        out["pass_at_1"][variant] = {
            name: round(statistics.fmean(run["suites"][name]["pass_at_1"] for run in runs.values()), 4)
            for name in names
        }
        if variant != "sft":
            curves = [run["curves"] for run in runs.values()]
            out["curves"][variant] = {
                name: _mean_curve([curve[name] for curve in curves if name in curve]) for name in CURVES
            }
        if variant != reference and (seeds := sorted(runs.keys() & references.keys())):
            out["differences"][variant] = {
                name: compare_by_task(solved(runs, name, seeds), solved(references, name, seeds), reference)
                for name in names
            }
    return out


def _mean_curve(curves: Sequence[Sequence[float | None]]) -> list[float | None]:
    known = [[value for value in values if value is not None] for values in zip(*curves, strict=True)]
    return [round(statistics.fmean(values), 5) if values else None for values in known]


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, "runs/staleness")
    every = ("sft", *VARIANTS)
    parser.add_argument("--variants", default=",".join(every), help="comma-separated names (default: all of them)")
    parser.add_argument(
        "--reference", choices=every, default="synchronous", help="of the differences (default: synchronous)"
    )
    parser.add_argument("--steps", type=int, help="steps of RL, for rows of their own (default: those of the config)")
    parser.add_argument("--base", type=Path, help="folder whose seedN/sft are used as they are (default: none)")
    o = parser.parse_args(argv)
    chosen = o.variants.split(",")
    if unknown := [name for name in chosen if name not in every]:
        parser.error(f"--variants names {unknown[0]!r}; use some of {', '.join(every)}")
    folder, base = o.workdir.absolute(), o.base and o.base.absolute()
    file = o.rows or folder / f"{_with_steps('rows', o.steps)}.json"
    try:
        rows = complete_rows(
            file, o.seeds, chosen, lambda seed, variant: measure(folder, o.size, seed, variant, o.steps, base)
        )
    except UserError as error:
        parser.error(str(error))
    print(json.dumps(summarize(rows, o.reference)))


if __name__ == "__main__":
    main()
