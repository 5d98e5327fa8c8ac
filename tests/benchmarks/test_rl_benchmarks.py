"""What benchmarks.rl_step and benchmarks.staleness make of the runs that they start."""

import dataclasses
import json
import math

import pytest
from ml_collections import ConfigDict

from benchmarks import rl_step, seeded_runs, staleness
from benchmarks.peers import completions
from composer_jax.observe.metrics import MetricsWriter
from composer_jax.schema.config_dict import to_config_dict
from composer_jax.schema.run_config import run_config
from composer_jax.train.losses import PolicyLossConfig
from configs.tiny import get_config
from launch import flags


def write_metrics(path, rows):
    with MetricsWriter(path) as metrics:
        for step, row in enumerate(rows, start=1):
            metrics.write(step, **row)


def test_rates_and_phases_are_those_of_the_median_step_after_compilation(tmp_path, monkeypatch):
    started = []

    def launch(checkout, entry, workdir):
        started.append((checkout.name, entry))
        workdir.mkdir(exist_ok=True, parents=True)
        if entry == "rl":
            slow = {"rollout_s": 1.0, "sandbox_s": 0.0, "train_s": 99.0, "step_s": 100.0}
            fast = {"rollout_s": 1.0, "sandbox_s": 0.5, "train_s": 2.0, "step_s": 4.0}
            write_metrics(workdir / "metrics" / "rl.jsonl", [slow, slow, fast, fast, fast])

    monkeypatch.setattr(rl_step, "launch", launch)
    job = rl_step.DemoJob(tmp_path / "checkout", tmp_path / "job")
    for number in range(2):
        job.play(number)
    assert [entry for _, entry in started] == ["pretrain", "sft", "rl", "rl"]
    assert job.episodes_per_minute() == 60 * 64 / 4.0
    assert job.phases() == {"rollout": 0.25, "sandbox": 0.125, "train": 0.5, "other": 0.125}


def test_both_learners_get_the_same_prompts_and_the_same_reward():
    assert completions.prompt(3, 1024) == completions.prompt(3, 1024) != completions.prompt(4, 1024)
    assert 0 not in completions.prompt(3, 1024) and len(completions.prompt(3, 1024)) == completions.PROMPT_TOKENS
    assert completions.reward([2, 4, 5, 7]) == 0.5 and completions.reward([]) == 0
    assert completions.figures([9.0, 9.0, 9.0, 2.0, 4.0, 3.0])["episodes_per_minute"] == 60 * 64 / 3


def row(seed, variant, solved, **curves):
    suites = {"bugs": {"pass_at_1": sum(solved.values()) / len(solved), "solved": solved}}
    return {"seed": seed, "variant": variant, "suites": suites, "curves": dict.fromkeys(staleness.CURVES, []) | curves}


def test_variants_are_compared_by_task_over_the_seeds_that_both_have():
    rows = [
        row(0, "synchronous", {"a": 1.0, "b": 0.0}, reward=[0.0, 1.0]),
        row(1, "synchronous", {"c": 0.5}, reward=[0.5, None]),
        row(0, "staleness_4", {"a": 1.0, "b": 1.0}, reward=[0.0, 0.5]),
        row(0, "sft", {"a": 0.0, "b": 0.0}),
    ]
    out = staleness.summarize(rows)
    assert out["seeds"] == {"synchronous": [0, 1], "staleness_4": [0], "sft": [0]}
    assert out["pass_at_1"]["synchronous"] == {"bugs": 0.5}
    difference = out["differences"]["staleness_4"]["bugs"]
    assert (difference["difference"], difference["tasks"]) == (0.5, 2)
    assert out["differences"]["sft"]["bugs"]["difference"] == -0.5
    assert out["curves"]["synchronous"]["reward"] == [0.25, 1.0] and "sft" not in out["curves"]
    to_sft = staleness.summarize(rows, "sft")["differences"]
    assert "sft" not in to_sft and to_sft["synchronous"]["bugs"]["difference"] == 0.5


def test_rows_of_earlier_versions_lack_a_curve():
    rows = [row(seed, "synchronous", {"a": 1.0}, dual_clipped=[0.5]) for seed in (0, 1)]
    del rows[1]["curves"]["dual_clipped"]
    assert staleness.summarize(rows)["curves"]["synchronous"]["dual_clipped"] == [0.5]


@pytest.mark.parametrize(("variant", "bound"), [("staleness_3", math.inf), ("staleness_3_dual_clip", 3.0)])
def test_a_variant_with_dual_clip_differs_from_the_one_without_in_its_bound_alone(
    variant, bound, tmp_path, monkeypatch
):
    """As the command line of its run sets it, and as a run's config.json keeps it."""
    started = []
    monkeypatch.setattr(seeded_runs, "run_entry", lambda entry, *arguments: started.append(arguments))
    monkeypatch.setattr(staleness, "final_suites", lambda workdir, policies: {})
    monkeypatch.setattr(staleness, "curves", lambda metrics, columns: {})
    staleness.measure(tmp_path, "smoke", 0, variant, steps=2)
    config = run_config(flags.parse(["pipeline", *started[-1]])[0])
    config = run_config(ConfigDict(json.loads(json.dumps(to_config_dict(config).to_dict()))))
    assert config.rl == dataclasses.replace(
        run_config(get_config("smoke")).rl, steps=2, max_staleness=3, loss=PolicyLossConfig(dual_clip=bound)
    )


def test_a_base_without_a_policy_before_rl_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        staleness.main([f"--workdir={tmp_path}", f"--base={tmp_path / 'demo'}", "--seeds=3", "--variants=sft"])
    assert f"{tmp_path / 'demo' / 'seed3' / 'sft'} has no policy" in capsys.readouterr().err


def test_a_curve_has_a_mean_for_each_tenth_of_the_run(tmp_path):
    write_metrics(tmp_path / "rl.jsonl", [{"reward": step // 2, "entropy": None} for step in range(20)])
    curves = seeded_runs.curves(tmp_path / "rl.jsonl", staleness.CURVES)
    assert curves["reward"] == list(range(10)) and curves["entropy"] == [None] * 10


def test_finished_rows_are_not_run_again(tmp_path, monkeypatch, capsys):
    rows = [row(0, name, {"a": 1.0}) for name in ("sft", "synchronous")]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    monkeypatch.setattr(staleness, "measure", pytest.fail)
    staleness.main([f"--workdir={tmp_path}", "--seeds=0", "--variants=sft,synchronous"])
    assert json.loads(capsys.readouterr().out)["seeds"] == {"sft": [0], "synchronous": [0]}
