"""The memory chain in its smallest size, as a user starts it, with the summaries left out of the loss of RL."""

import json

import pytest

from composer_jax.observe.metrics import read_metrics
from tests.stages.command_line import finish, start

pytestmark = pytest.mark.slow
NETWORK = dict(d_model=32, n_heads=2, kv_lora_rank=16, qk_nope_dim=8, qk_rope_dim=8, v_head_dim=8, dense_ff_dim=32)


def test_every_stage_runs_and_the_facts_of_summaries_are_measured(tmp_path):
    arguments = (
        "--config=memory_chain:smoke",
        "--config.rl.compaction=untrained",
        "--config.evaluate.which=('after',)",
        "--config.sampler.slots=16",
        "--config.sampler.prefill_shapes=((8, 64),)",
        *(f"--config.model.{field}={size}" for field, size in NETWORK.items()),
    )
    result = finish(start(tmp_path / "run", *arguments, cache=tmp_path / "xla"))
    assert result.returncode == 0, result.stderr
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert set(results["sft"]["expert_reward"]) == {"chain", "chain_start"}
    assert results["sft"]["expert_reward"]["chain_start"] == 1.0
    measured = results["suites"]["chain"]["after"]
    assert measured["episodes"] == 8 and {"facts_kept", "facts_kept_last"} <= set(measured)
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics" / "rl.jsonl")] == [1, 2]
