"""Does the loss fall log-linearly with compute? `python -m benchmarks.cpt_scaling [--seeds=0,1,2]`.

Composer 2 (arXiv 2603.24477) reports that the loss of continued pretraining falls in proportion to the logarithm of
its compute. The network of the demo is trained on its pretraining mixture (configs/tiny.py) with several budgets, each
with a learning-rate schedule of its own, and measured on held-out files. The fit is L = a - b log10(C), C in
floating-point operations of training. A stopped run is continued. A finished one is a row of --rows and does not run
again.

Prints progress on stderr and, as the last line of stdout, one JSON object:
    r2        of the fit to the mean losses
    a, b      of the fit, nats per token; b is what ten times the compute saves
    points    of each budget: steps, flops, loss (mean over the seeds), and low and high, its 95 % interval over seeds
    seeds     that all budgets were run with
"""

import json
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.seeded_runs import Row, complete_rows, make_parser, run_pipeline, runs_of_common_seeds
from composer_jax.evals.interval import interval
from composer_jax.models.flops import forward_flops
from composer_jax.schema.run_config import run_config
from configs import tiny

BUDGETS = (0.25, 0.5, 1.0, 2.0)
"""Times the steps of the preset."""
VARIANTS = tuple(f"{budget:g}" for budget in BUDGETS)


def measure(folder: Path, size: str, seed: int, variant: str) -> Row:
    """Returns the row of a run: seed, variant, steps, flops, and the held-out loss after its last step."""
    config = run_config(tiny.get_config(size).to_dict())
    pretrain = config.pretrain
    steps = round(float(variant) * pretrain.steps)
    workdir = folder / f"seed{seed}" / variant
    run_pipeline(workdir, size, seed, entry="launch.pretrain", pretrain__steps=steps)
    result = json.loads((workdir / "stages" / "pretrain.json").read_text())
    flops = 3 * steps * pretrain.batch_size * forward_flops(config.model, pretrain.seq_len)
    return {
        "seed": seed,
        "variant": variant,
        "steps": steps,
        "flops": flops,
        "heldout_nll": result["heldout_nll_last"],
    }


def fit(flops: Sequence[float], losses: Sequence[float]) -> tuple[float, float, float]:
    """Returns a, b and R^2 of the least-squares fit losses = a - b log10(flops)."""
    x, y = np.log10(flops), np.asarray(losses)
    slope, a = np.polyfit(x, y, 1)
    residuals = y - (a + slope * x)
    return float(a), float(-slope), float(1 - (residuals**2).sum() / ((y - y.mean()) ** 2).sum())


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the printed object; seeds that lack a budget are left out."""
    runs = runs_of_common_seeds(rows, VARIANTS)
    seeds = list(runs[VARIANTS[0]])
    if not seeds:
        return {"r2": None, "a": None, "b": None, "points": [], "seeds": []}
    points = []
    for by_seed in runs.values():
        losses = [row["heldout_nll"] for row in by_seed.values()]
        low, high = interval(losses)
        first = next(iter(by_seed.values()))
        points.append(
            {"steps": first["steps"], "flops": first["flops"]}
            | {name: round(x, 4) for name, x in (("loss", statistics.fmean(losses)), ("low", low), ("high", high))}
        )
    a, b, r2 = fit([point["flops"] for point in points], [point["loss"] for point in points])
    return {"r2": round(r2, 4), "a": round(a, 4), "b": round(b, 4), "points": points, "seeds": seeds}


def main(argv: Sequence[str] | None = None) -> None:
    o = make_parser(__doc__, "runs/cpt_scaling").parse_args(argv)
    rows = complete_rows(o.rows or o.workdir / "rows.json", o.seeds, VARIANTS, partial(measure, o.workdir, o.size))
    print(json.dumps(summarize([row for row in rows if row["seed"] in o.seeds])))


if __name__ == "__main__":
    main()
