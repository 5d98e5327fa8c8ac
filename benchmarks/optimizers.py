"""How many steps Muon needs for AdamW's loss: `python -m benchmarks.optimizers [--seeds=0,1,2]`.

Trains the network of the demo on its pretraining mixture (configs/tiny.py), with the learning-rate schedule of each
length run to its end. The learning rates are searched first, with the first seed: the one with the lowest held-out loss
is taken. Then, for every seed, AdamW takes all steps, and Muon takes FRACTIONS of them. A stopped run is continued. A
finished one is a row of --rows and does not run again.

Prints progress on stderr and, as the last line of stdout, one JSON object:
    muon_steps_ratio    the fraction of the steps after which Muon reaches AdamW's last held-out loss: mean over seeds,
                        interpolated between FRACTIONS; null if a seed's does not reach it within all steps. A seed
                        whose shortest run reaches it counts with that run's fraction
    ratios              of each seed
    seeds               that both optimizers were run with
    losses              optimizer -> fraction -> held-out loss of each seed, nats per token
    search              optimizer -> learning rate -> held-out loss of the first seed, nats per token
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.seeded_runs import Row, complete_rows, make_parser, run_pipeline
from configs import tiny

ADAMW, MUON = "adamw", "muon"
RATES = {ADAMW: (1.5e-3, 3e-3, 6e-3, 1.2e-2), MUON: (3e-3, 6e-3, 1.2e-2, 2.4e-2)}
"""Learning rates of the search; the demo trains with AdamW at 3e-3."""
FRACTIONS = (0.5, 0.75, 1.0)
"""Of the preset's steps, that Muon takes."""


def variant(optimizer: str, rate: float, fraction: float) -> str:
    """Returns the name of a run in the rows."""
    return f"{optimizer} {rate:g} {fraction:g}"


def measure(folder: Path, size: str, seed: int, name: str) -> Row:
    """Returns the row of a run: seed, variant, and the held-out loss after its last step."""
    optimizer, rate, fraction = name.split()
    config: Any = tiny.get_config(size)
    steps = round(float(fraction) * config.pretrain.steps)
    workdir = folder / f"seed{seed}" / name.replace(" ", "_")
    fields = {"optimizer__name": optimizer, "optimizer__peak": rate, "steps": steps}
    fields = {f"pretrain__{field}": value for field, value in fields.items()}
    run_pipeline(workdir, size, seed, entry="launch.pretrain", **fields)
    result = json.loads((workdir / "stages" / "pretrain.json").read_text())
    return {"seed": seed, "variant": name, "heldout_nll": result["heldout_nll_last"]}


def search(rows: Sequence[Row], seed: int) -> dict[str, dict[str, float]]:
    """Returns optimizer -> learning rate -> held-out loss of a seed's runs of all steps, as far as there are rows."""
    losses = {row["variant"]: row["heldout_nll"] for row in rows if row["seed"] == seed}
    return {
        optimizer: {f"{rate:g}": losses[run] for rate in rates if (run := variant(optimizer, rate, 1.0)) in losses}
        for optimizer, rates in RATES.items()
    }


def best_rates(rows: Sequence[Row], seed: int) -> dict[str, float]:
    """Returns optimizer -> the learning rate with the lowest loss of the search."""
    return {name: float(min(losses, key=losses.__getitem__)) for name, losses in search(rows, seed).items()}


def steps_ratio(muon: Mapping[float, float], target: float) -> float | None:
    """Returns the fraction of the steps at which a loss falls to the target, linearly between the fractions of `muon`.

    The shortest fraction, if its loss is that low already; None if no loss is.
    """
    before = None
    for fraction in sorted(muon):
        loss = muon[fraction]
        if loss <= target:
            if before is None:
                return fraction
            start, high = before
            return start + (fraction - start) * (high - target) / (high - loss)
        before = fraction, loss
    return None


def summarize(rows: Sequence[Row], seed: int) -> dict[str, Any]:
    """Returns the printed object. seed: that of the search."""
    rates = best_rates(rows, seed)
    losses: dict[str, dict[float, dict[int, float]]] = {ADAMW: {1.0: {}}, MUON: {part: {} for part in FRACTIONS}}
    for optimizer, by_fraction in losses.items():
        for fraction, by_seed in by_fraction.items():
            name = variant(optimizer, rates[optimizer], fraction)
            by_seed |= {row["seed"]: row["heldout_nll"] for row in rows if row["variant"] == name}
    complete = [set(by_seed) for by_fraction in losses.values() for by_seed in by_fraction.values()]
    seeds = sorted(set.intersection(*complete))
    muon = {s: {fraction: by_seed[s] for fraction, by_seed in losses[MUON].items()} for s in seeds}
    ratios = [steps_ratio(muon[s], losses[ADAMW][1.0][s]) for s in seeds]
    reached = [ratio for ratio in ratios if ratio is not None]
    return {
        "muon_steps_ratio": round(statistics.fmean(reached), 3) if reached and len(reached) == len(ratios) else None,
        "ratios": [ratio and round(ratio, 3) for ratio in ratios],
        "seeds": seeds,
        "losses": {
            f"{optimizer} at {rates[optimizer]:g}": {
                f"{fraction:g}": [by_seed[s] for s in seeds] for fraction, by_seed in by_fraction.items()
            }
            for optimizer, by_fraction in losses.items()
        },
        "search": search(rows, seed),
    }


def run_all(o: argparse.Namespace) -> list[Row]:
    """Runs the search with the first seed, then all seeds at the best rates."""
    file = o.rows or o.workdir / "rows.json"
    complete = partial(complete_rows, file, measure=partial(measure, o.workdir, o.size))
    tried = [variant(optimizer, rate, 1.0) for optimizer, rates in RATES.items() for rate in rates]
    rates = best_rates(complete(o.seeds[:1], tried), o.seeds[0])
    compared = [variant(ADAMW, rates[ADAMW], 1.0), *[variant(MUON, rates[MUON], fraction) for fraction in FRACTIONS]]
    return complete(o.seeds, compared)


def main(argv: Sequence[str] | None = None) -> None:
    o = make_parser(__doc__, "runs/optimizers").parse_args(argv)
    print(json.dumps(summarize(run_all(o), o.seeds[0])))


if __name__ == "__main__":
    main()
