"""What benchmarks.optimizers makes of the losses of its runs."""

import json

import pytest

from benchmarks import optimizers
from benchmarks.optimizers import steps_ratio, summarize


def row(seed, variant, loss):
    return {"seed": seed, "variant": variant, "heldout_nll": loss}


SEARCH = [row(0, "adamw 0.003 1", 3.0), row(0, "adamw 0.006 1", 3.2), row(0, "muon 0.003 1", 2.9)]
ROWS = [
    *SEARCH,
    row(0, "muon 0.012 1", 2.8),
    row(0, "muon 0.012 0.5", 3.1),
    row(0, "muon 0.012 0.75", 2.9),
    row(1, "adamw 0.003 1", 3.0),
    row(1, "muon 0.012 0.5", 2.9),
    row(1, "muon 0.012 0.75", 2.8),
    row(1, "muon 0.012 1", 2.7),
    row(2, "adamw 0.003 1", 0.0),  # has not finished
]


@pytest.mark.parametrize(
    ("target", "ratio"), [(3.1, 0.5), (4.0, 0.5), (3.0, 0.625), (2.9, 0.75), (2.8, 1.0), (2.7, None)]
)
def test_the_ratio_is_where_the_losses_of_muon_cross_the_target(target, ratio):
    assert steps_ratio({1.0: 2.8, 0.5: 3.1, 0.75: 2.9}, target) == (ratio and pytest.approx(ratio))


def test_seeds_that_lack_a_run_are_left_out():
    out = summarize(ROWS, 0)
    assert json.loads(json.dumps(out)) == out
    assert out["seeds"] == [0, 1] and out["ratios"] == [0.625, 0.5] and out["muon_steps_ratio"] == 0.562
    assert out["search"] == {"adamw": {"0.003": 3.0, "0.006": 3.2}, "muon": {"0.003": 2.9, "0.012": 2.8}}
    assert out["losses"]["adamw at 0.003"] == {"1": [3.0, 3.0]}
    assert out["losses"]["muon at 0.012"] == {"0.5": [3.1, 2.9], "0.75": [2.9, 2.8], "1": [2.8, 2.7]}


def test_a_seed_that_misses_the_loss_leaves_no_mean():
    out = summarize([*ROWS[:-5], row(0, "adamw 0.003 1", 2.0)], 0)
    assert out["muon_steps_ratio"] is None and out["ratios"] == [None]


def test_all_seeds_run_with_the_best_rates_of_the_first(tmp_path, monkeypatch):
    runs = []

    def measure(folder, size, seed, name):
        runs.append((seed, name))
        optimizer, rate, fraction = name.split()
        return row(seed, name, abs(float(rate) - 0.006) + 1 - float(fraction))

    monkeypatch.setattr(optimizers, "measure", measure)
    optimizers.main(["--seeds=4,5", f"--workdir={tmp_path}"])
    assert len(runs) == len(set(runs)) == 8 + 2 + 4
    assert {name for seed, name in runs if seed == 5} == {
        "adamw 0.006 1",
        "muon 0.006 0.5",
        "muon 0.006 0.75",
        "muon 0.006 1",
    }
    optimizers.main(["--seeds=4,5", f"--workdir={tmp_path}"])
    assert len(runs) == 14
