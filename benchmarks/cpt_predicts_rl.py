"""Does a lower loss after continued pretraining give a higher reward? `python -m benchmarks.cpt_predicts_rl`.

Composer 2 (arXiv 2603.24477) reports that the loss of continued pretraining predicts the reward after reinforcement
learning. The network of the demo (configs/tiny.py) is trained with three budgets of pretraining, each with a
learning-rate schedule of its own. SFT and RL follow, equal for all budgets: a third and a half of the preset's steps,
so that nine runs end in two hours on two cores. The policy before RL is the control: what RL adds is the difference of
the two correlations. A stopped run is continued. A finished one is a row of --rows and does not run again.

Prints progress on stderr and, as the last line of stdout, one JSON object:
    points       of each run: seed, steps of pretraining, loss (nats per token of held-out files after pretraining),
                 reward (pass@1 of held-out tasks after RL) and reward_before (before it)
    spearman     rank correlation of loss and reward over all runs; null with fewer than three
    low, high    its 95 % interval by bootstrap over the runs
    spearman_before   the same of reward_before
    gain, gain_before  what the largest budget adds to reward and reward_before of the smallest: [mean over the seeds,
                 low, high], a 95 % interval over them; null with one seed
    seeds        that all budgets were run with
"""

import json
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats

from benchmarks.seeded_runs import Row, complete_rows, make_parser, run_pipeline, runs_of_common_seeds
from composer_jax.evals.interval import interval
from composer_jax.schema.run_config import run_config
from configs import tiny

BUDGETS = (0.1, 0.3, 1.0)
"""Times the steps of the preset."""
VARIANTS = tuple(f"{budget:g}" for budget in BUDGETS)
SFT_STEPS = 1 / 3
"""Times the steps of the preset: after all of them the demo repairs most of its tasks whatever it knew before."""
RL_STEPS = 1 / 2
"""Times the steps of the preset."""
ATTEMPTS = 2
"""At every held-out task."""
RESAMPLES = 2000


def measure(folder: Path, size: str, seed: int, variant: str) -> Row:
    """Returns the row of a run: seed, variant, steps, loss, reward, reward_before."""
    config = run_config(tiny.get_config(size).to_dict())
    steps = round(float(variant) * config.pretrain.steps)
    workdir = folder / f"seed{seed}" / variant
    fields: dict[str, Any] = {
        "pretrain__steps": steps,
        "sft__steps": round(SFT_STEPS * config.sft.steps),
        "rl__steps": round(RL_STEPS * config.rl.steps),
        "evaluate__which": "('before','after')",
    }
    fields |= {f"evaluate__suites__{name}__attempts": ATTEMPTS for name in config.evaluate.suites}
    run_pipeline(workdir, size, seed, **fields)
    results = json.loads((workdir / "results.json").read_text())
    # Suites that repeat the tasks of another one under other conditions do not count twice.
    suites = [results["suites"][name] for name, suite in config.evaluate.suites.items() if not suite.compare_to]
    reward, before = (statistics.fmean(suite[which]["pass_at_1"] for suite in suites) for which in ("after", "before"))
    loss = results["cpt"]["heldout_nll_last"]
    return {
        "seed": seed,
        "variant": variant,
        "steps": steps,
        "loss": loss,
        "reward": reward,
        "reward_before": before,
    }


def spearman(losses: Sequence[float], rewards: Sequence[float]) -> float | None:
    """Returns the rank correlation; None where one side does not vary or there are fewer than three runs."""
    if len(losses) < 3 or len(set(losses)) == 1 or len(set(rewards)) == 1:
        return None
    return float(np.corrcoef(scipy.stats.rankdata(losses), scipy.stats.rankdata(rewards))[0, 1])


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the printed object; seeds that lack a budget are left out."""
    runs = runs_of_common_seeds(rows, VARIANTS)
    seeds = list(runs[VARIANTS[0]])
    points = [
        {"seed": seed} | {name: runs[variant][seed][name] for name in ("steps", "loss", "reward", "reward_before")}
        for variant in VARIANTS
        for seed in seeds
    ]
    losses, rewards, before = ([point[name] for point in points] for name in ("loss", "reward", "reward_before"))
    summary: dict[str, Any] = {"points": points, "spearman": spearman(losses, rewards), "low": None, "high": None}
    if summary["spearman"] is not None:
        draws = np.random.default_rng(0).integers(len(points), size=(RESAMPLES, len(points)))
        resampled = [spearman([losses[i] for i in draw], [rewards[i] for i in draw]) for draw in draws.tolist()]
        low, high = np.quantile([x for x in resampled if x is not None], (0.025, 0.975))
        summary |= {"low": round(float(low), 3), "high": round(float(high), 3)}
    summary["spearman_before"] = spearman(losses, before)
    smallest, largest = VARIANTS[0], VARIANTS[-1]
    for name, key in (("gain", "reward"), ("gain_before", "reward_before")):
        gains = [runs[largest][seed][key] - runs[smallest][seed][key] for seed in seeds]
        summary[name] = [round(x, 3) for x in (statistics.fmean(gains), *interval(gains))] if len(gains) > 1 else None
    return summary | {"seeds": seeds}


def main(argv: Sequence[str] | None = None) -> None:
    o = make_parser(__doc__, "runs/cpt_predicts_rl").parse_args(argv)
    rows = complete_rows(o.rows or o.workdir / "rows.json", o.seeds, VARIANTS, partial(measure, o.workdir, o.size))
    print(json.dumps(summarize([row for row in rows if row["seed"] in o.seeds])))


if __name__ == "__main__":
    main()
