"""results.json: complete after a whole run, honest about a part of one."""

import dataclasses
import json
import types
from typing import Any

import pytest

from benchmarks import demo
from composer_jax.schema.run_config import run_config
from composer_jax.stages.report import report, results
from composer_jax.storage.workdir import Workdir
from configs.tiny import get_config
from tests.stages.contract import assert_contract

SUITES: dict[str, dict[str, Any]] = {
    name: {"pass_at_1": p, "pass_at_k": p + 0.1, "tokens_per_summary": 10 * p, "solved": {f"{name}-1": p}}
    for name, p in {
        "two_bugs": 0.5,
        "unseen": 0.4,
        "chain_whole": 0.8,
        "chain": 0.3,
        "chain_long": 0.2,
    }.items()
}
SUITES["two_bugs"]["failed_tokens"] = {"two_bugs-1": 80.0}
SUITES["chain"]["compaction_error"] = 0.5
SUITES["chain_long"]["compaction_error"] = 0.6
EVALUATION = {
    "suites": SUITES,
    "decode_tokens_per_s": 900.0,
    "sandbox_runs": 3,
    "sandbox_hits": 4,
    "seconds": 6.0,
    "peak_rss_gb": 0.4,
}
DONE = {
    "pretrain": {
        "heldout_nll_first": 7.0,
        "heldout_nll_last": 3.0,
        "tokens": 1000,
        "train_tokens_per_s": 50.0,
        "seconds": 10.0,
        "peak_rss_gb": 0.5,
    },
    "sft": {
        "loss_last": 0.3,
        "tokens": 500,
        "expert_reward": {"bugfix": 0.4},
        "dropped_rows": 0,
        "seconds": 5.0,
        "peak_rss_gb": 0.7,
    },
    "evaluate_before": EVALUATION,
    "rl": {
        "steps": 2,
        "episodes": 32,
        "rollout_s": 3.0,
        "sandbox_s": 1.0,
        "train_s": 2.0,
        "step_s": 8.0,
        "sandbox_runs": 16,
        "sandbox_hits": 10,
        "compilations_after_first_tenth": 0,
        "weight_gap_max": 0.0123,
        "seconds": 9.0,
        "peak_rss_gb": 0.6,
    },
    "evaluate_after": EVALUATION,
}


@pytest.fixture
def run(tmp_path):
    """Stage names -> what a Run is to `results`, with these stages done."""

    def make(*stages):
        workdir = Workdir(tmp_path / "-".join(stages or ["none"]), {"seed": 7})
        for stage in stages:
            workdir.mark_done(stage, DONE[stage])
        config = dataclasses.replace(run_config(get_config()), seed=7)
        return types.SimpleNamespace(workdir=workdir, path=workdir.path, config=config)

    return make


def test_a_whole_run_fulfils_the_contract(run):
    summary = results(run(*DONE))
    assert_contract(summary, k=8)
    assert summary["wall_seconds"] == 36.0
    seconds = {"pretrain": 10.0, "sft": 5.0, "evaluate_before": 6.0, "rl": 9.0, "evaluate_after": 6.0}
    assert summary["phases_s"] == seconds
    assert summary["rl"]["pass_at_1_before"] == 0.5 and summary["rl"]["pass_at_8_before"] == 0.6
    assert summary["rl"]["unseen_family_after"] == 0.4
    assert summary["summary"]["pass_before"] == 0.3 and summary["summary"]["pass_uncompacted_before"] == 0.8
    assert summary["summary"]["prompted_baseline"] == {"pass": 0.2, "tokens": 2.0, "compaction_error": 0.6}
    assert summary["throughput"]["sandbox_runs_per_s"] == 2.0
    assert summary["rl"]["weight_gap_max"] == 0.0123
    assert summary["peak_rss_gb"] == 0.7
    assert set(summary["suites"]["two_bugs"]["before"]) == {"pass_at_1", "pass_at_k", "tokens_per_summary"}
    json.dumps(summary, allow_nan=False)


def test_the_demo_benchmark_reads_these_results(run):
    summary = results(run(*DONE))
    better = json.loads(json.dumps(summary))
    better["rl"]["pass_at_1_after"], better["summary"]["compaction_error_after"] = 1.0, 0.1
    line = demo.summarize({0: summary, 1: better})
    assert line["mean"]["rl.pass_at_1_after"] == 0.75 and line["mean"]["minutes"] == 0.6
    assert not line["checks"]["RL at least doubles the pass rate of two bugs"] and line["checks"]["at most 20 minutes"]
    assert not line["checks"]["RL at least halves the compaction error"]
    alone = demo.summarize({0: better})["checks"]
    assert alone["RL at least halves the compaction error"] and alone["RL at least doubles the pass rate of two bugs"]


@pytest.mark.parametrize("n", range(len(DONE)))
def test_stages_that_are_not_done_are_left_out(run, n):
    done = list(DONE)[:n]
    summary = results(run(*done))
    assert set(summary["phases_s"]) == set(done)
    assert ("cpt" in summary, "sft" in summary) == ("pretrain" in done, "sft" in done)
    rl = summary.get("rl", {})
    assert ("pass_at_1_before" in rl, "steps" in rl) == ("evaluate_before" in done, "rl" in done)
    assert "pass_at_1_after" not in rl
    assert ("summary" in summary) == ("evaluate_before" in done)


def test_an_evaluation_without_rl_is_reported(run):
    """Stages can be run alone, and in another order."""
    summary = results(run("pretrain", "sft", "evaluate_before"))
    assert summary["rl"].keys() == {"pass_at_1_before", "pass_at_8_before", "unseen_family_before"}


@pytest.mark.parametrize("stages", [(), ("pretrain",), tuple(DONE)], ids=len)
def test_a_report_can_be_written_at_any_time(run, stages):
    of = run(*stages)
    path = report(of)
    assert path.exists() and path.suffix == ".html"
    assert json.loads((of.path / "results.json").read_text())["config_hash"] == of.workdir.config_hash
