"""What rounded operands cost in loss. `python -m benchmarks.precision [--seeds=0,1,2] [--steps=N]`.

The network of the demo is trained on its pretraining mixture (configs/tiny.py) with plain operands, with those of
MXFP8 and NVFP4' (model.precision), and with routed experts in INT4 (model.expert_qat), and measured on held-out files
in the format it was trained in. Runs of one seed begin with the same weights and read the same tokens. A stopped run is
continued. A finished one is a row of --rows and does not run again; a file of rows holds runs of one number of steps.

Prints progress on stderr and, as the last line of stdout, one JSON object:
    VARIANT   none, mxfp8, nvfp4, int4: loss, nats per held-out token (mean over the seeds); gap, how much more that is
              than the loss of `none`; and of all but `none` low and high, the gap's 95 % interval over seeds, each seed
              paired with itself
    seeds     that all variants were run with
    steps     of pretraining
"""

import json
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.seeded_runs import Row, complete_rows, make_parser, run_pipeline, runs_of_common_seeds
from composer_jax.evals.interval import interval
from composer_jax.schema.run_config import run_config
from configs import tiny

FIELDS = {
    "none": {},
    "mxfp8": {"model__precision": "mxfp8"},
    "nvfp4": {"model__precision": "nvfp4"},
    "int4": {"model__expert_qat": "int4"},
}
"""Variant -> what it changes in the config."""


def measure(folder: Path, size: str, steps: int, seed: int, variant: str) -> Row:
    """Returns the row of a run: seed, variant, steps, and the held-out loss after the last of them."""
    workdir = folder / f"seed{seed}" / variant
    run_pipeline(workdir, size, seed, entry="launch.pretrain", pretrain__steps=steps, **FIELDS[variant])
    result = json.loads((workdir / "stages" / "pretrain.json").read_text())
    return {"seed": seed, "variant": variant, "steps": steps, "heldout_nll": result["heldout_nll_last"]}


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the printed object; seeds that lack a variant are left out."""
    runs = runs_of_common_seeds(rows, list(FIELDS))
    seeds = list(runs["none"])
    summary: dict[str, Any] = {"seeds": seeds}
    if not seeds:
        return summary
    losses = {name: [row["heldout_nll"] for row in by_seed.values()] for name, by_seed in runs.items()}
    for name, of_seeds in losses.items():
        gaps = [loss - plain for loss, plain in zip(of_seeds, losses["none"], strict=True)]
        numbers = {"loss": statistics.fmean(of_seeds), "gap": statistics.fmean(gaps)}
        if name != "none":
            numbers |= dict(zip(("low", "high"), interval(gaps), strict=True))
        summary[name] = {key: round(value, 4) for key, value in numbers.items()}
    return summary


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, "runs/precision")
    parser.add_argument("--steps", type=int, help="steps of pretraining (default: those of the config)")
    o = parser.parse_args(argv)
    steps = o.steps or run_config(tiny.get_config(o.size).to_dict()).pretrain.steps
    file = o.rows or o.workdir / "rows.json"
    others = {row["steps"] for row in json.loads(file.read_bytes())} - {steps} if file.exists() else set()
    if others:
        parser.error(f"{file} has runs of {others.pop()} steps, not of {steps}; name another file with --rows")
    rows = complete_rows(file, o.seeds, list(FIELDS), partial(measure, o.workdir, o.size, steps))
    print(json.dumps(summarize([row for row in rows if row["seed"] in o.seeds]) | {"steps": steps}))


if __name__ == "__main__":
    main()
