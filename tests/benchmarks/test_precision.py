"""What benchmarks.precision makes of the losses of its runs, and which runs it starts."""

import json

import pytest

from benchmarks import precision
from benchmarks.precision import FIELDS, summarize
from composer_jax.schema.run_config import run_config
from configs import tiny


def row(seed, variant, loss):
    return {"seed": seed, "variant": variant, "heldout_nll": loss}


def test_gaps_are_paired_by_seed_and_seeds_that_lack_a_variant_are_left_out():
    gaps = {"none": (0.0, 0.0), "mxfp8": (0.01, 0.03), "nvfp4": (0.1, 0.2), "int4": (-0.01, -0.01)}
    rows = [row(seed, name, 3.0 + seed + gap[seed]) for name, gap in gaps.items() for seed in (0, 1)]
    out = summarize([*rows, row(2, "none", 99.0)])
    assert json.loads(json.dumps(out)) == out
    assert out["seeds"] == [0, 1] and out["none"] == {"loss": 3.5, "gap": 0.0}
    assert out["mxfp8"] == {"loss": 3.52, "gap": 0.02, "low": 0.01, "high": 0.03}
    assert out["nvfp4"] == {"loss": 3.65, "gap": 0.15, "low": 0.1, "high": 0.2}
    assert out["int4"] == {"loss": 3.49, "gap": -0.01, "low": -0.01, "high": -0.01}
    assert summarize(rows[:3]) == {"seeds": []}


def test_each_variant_is_one_run_and_a_finished_one_does_not_run_again(tmp_path, monkeypatch, capsys):
    started = []

    def run_pipeline(workdir, size, seed, *, entry, **fields):
        started.append(fields)
        (workdir / "stages").mkdir(parents=True)
        (workdir / "stages" / "pretrain.json").write_text(json.dumps({"heldout_nll_last": 3.0}))

    monkeypatch.setattr(precision, "run_pipeline", run_pipeline)
    for _ in range(2):
        precision.main([f"--workdir={tmp_path}", "--seeds=0", "--size=smoke", "--steps=3"])
    assert started == [{"pretrain__steps": 3} | fields for fields in FIELDS.values()]
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["nvfp4"]["gap"] == 0.0 and summary["steps"] == 3


def test_runs_of_another_number_of_steps_are_refused(tmp_path, capsys):
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([row(0, "none", 3.0) | {"steps": 40}]))
    with pytest.raises(SystemExit):
        precision.main([f"--workdir={tmp_path}", "--size=smoke", "--steps=3"])
    assert f"{rows} has runs of 40 steps, not of 3; name another file" in capsys.readouterr().err


def test_the_fields_are_those_of_the_config():
    for fields in FIELDS.values():
        config = tiny.get_config()
        for name, value in fields.items():
            config.update_from_flattened_dict({name.replace("__", "."): value})
            assert getattr(run_config(config.to_dict()).model, name.removeprefix("model__")) == value
