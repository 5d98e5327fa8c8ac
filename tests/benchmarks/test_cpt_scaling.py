"""What benchmarks.cpt_scaling makes of the losses of its runs."""

import json

import pytest

from benchmarks import cpt_scaling
from benchmarks.cpt_scaling import VARIANTS, fit, summarize


def row(seed, variant, flops, loss):
    return {"seed": seed, "variant": variant, "steps": round(100 * float(variant)), "flops": flops, "heldout_nll": loss}


LINE = [(1e10, 5.0), (1e11, 4.0), (1e12, 3.0), (1e13, 2.0)]


def test_the_fit_of_a_line_is_the_line():
    assert fit(*zip(*LINE, strict=True)) == pytest.approx((15.0, 1.0, 1.0))


def test_r2_is_the_explained_fraction_of_the_variance():
    # Two outer points on y = 0 and an inner one at 1: the best line is y = 1/3 and explains nothing.
    assert fit([1, 10, 100], [0, 1, 0])[1:] == pytest.approx((0.0, 0.0), abs=1e-9)


def test_seeds_that_lack_a_budget_are_left_out():
    rows = [
        row(seed, name, flops, loss + 0.1 * (2 * seed - 1))
        for seed in (0, 1)
        for name, (flops, loss) in zip(VARIANTS, LINE, strict=True)
    ]
    out = summarize([*rows, row(2, VARIANTS[0], 1e10, 99.0)])
    assert json.loads(json.dumps(out)) == out
    assert out["seeds"] == [0, 1] and (out["r2"], out["a"], out["b"]) == (1.0, 15.0, 1.0)
    assert [point["loss"] for point in out["points"]] == [5.0, 4.0, 3.0, 2.0]
    assert out["points"][0]["low"] == 4.9 and out["points"][0]["high"] == 5.1
    assert summarize(rows[:3]) == {"r2": None, "a": None, "b": None, "points": [], "seeds": []}


def test_budgets_are_fractions_of_the_presets_steps(tmp_path, monkeypatch):
    steps = []

    def run_pipeline(workdir, size, seed, *, entry, pretrain__steps):
        steps.append(pretrain__steps)
        (workdir / "stages").mkdir(parents=True)
        (workdir / "stages" / "pretrain.json").write_text(json.dumps({"heldout_nll_last": 3.0 - len(steps)}))

    monkeypatch.setattr(cpt_scaling, "run_pipeline", run_pipeline)
    cpt_scaling.main([f"--workdir={tmp_path}", "--seeds=0"])
    assert steps == [100, 200, 400, 800]
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["flops"] / rows[0]["flops"] for row in rows] == [1, 2, 4, 8]
