"""A published model, in small, becomes an agent: evaluation, SFT, RL and export, each from what came before it."""

import json

import numpy as np
import pytest

from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.checkpoint.convert import convert
from composer_jax.evals.score import score
from composer_jax.observe.episodes import read_episodes
from composer_jax.observe.metrics import read_metrics
from composer_jax.stages.model import load_hf
from composer_jax.stages.pipeline import pipeline
from composer_jax.stages.run import Run
from configs import smollm2_135m
from tests.stages.base_model import write_base

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["qwen", "harmony"])
def run(request, tmp_path_factory):
    """The folder of a finished run of configs/smollm2_135m.py:smoke on the small base, which chats in this format."""
    base = write_base(tmp_path_factory.mktemp("published") / "model", chat=request.param)
    config = smollm2_135m.get_config("smoke")
    config.base = f"hf:{base}"
    config.agent.limits.update({"max_turns": 2, "max_turn_tokens": 16, "max_episode_tokens": 8192})
    config.sft.update({"seq_len": 4096, "batch_size": 2, "steps": 2})
    config.sampler.update({"slots": 4, "max_model_len": 4096})
    config.rl.update({"batches": ((4096, 1),), "group_size": 2})
    config.rl.groups.bugs = 1
    config.evaluate.temperature = 0.0
    workdir = tmp_path_factory.mktemp("runs") / "base"
    with Run(config, workdir) as opened:
        pipeline(opened)
    return workdir


def test_every_policy_is_measured_with_an_interval(run):
    suites = json.loads((run / "results.json").read_text())["suites"]
    for policy in ("base", "sft", "rl"):
        assert set(suites[policy]) == {"pass_at_1", "low", "high", "tasks", "attempts"}
        assert 0 <= suites[policy]["low"] <= suites[policy]["pass_at_1"] <= suites[policy]["high"] <= 1
    assert set(suites["bugs"]) == {"base", "before", "after", "change"}


def test_greedy_attempts_at_a_task_are_equal(run):
    for which in ("base", "before", "after"):
        first, second = read_episodes(run / "episodes" / f"{which}.jsonl")
        assert first.seed != second.seed
        assert [m.text for m in first.segments[0]] == [m.text for m in second.segments[0]]


def test_the_expert_solves_its_tasks(run):
    assert json.loads((run / "results.json").read_text())["sft"]["expert_reward"] == {"bugs": 1.0}
    assert [row["step"] for row in read_metrics(run / "metrics" / "sft.jsonl")] == [1, 2]


def test_the_report_is_there_and_pretraining_is_not(run):
    assert (run / "report.html").stat().st_size > 10_000
    assert not (run / "checkpoints" / "pretrain").exists()


def test_the_agent_leaves_as_a_hugging_face_folder(run, tmp_path):
    """The folder of a run stands for the weights of its last stage; tokenizer and template come along."""
    assert open_checkpoint(str(run)).address.path.endswith("checkpoints/rl")
    convert(str(run), f"hf:{tmp_path / 'agent'}")
    trained, exported = (load_hf(tmp_path / "agent", dtype="float32"), tmp_path / "agent")
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= {file.name for file in exported.iterdir()}
    ids = np.asarray([trained.tokenizer.encode("def f(): return 1")], np.int32)
    logprobs = score(trained.definition, trained.params, trained.router_bias, ids, mesh=trained.mesh).logprobs
    assert np.isfinite(logprobs).all()
