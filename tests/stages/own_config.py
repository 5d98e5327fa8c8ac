"""A config that names every extension of own_extensions.py by import path, and a suite of its tasks.

test_extensions_pipeline.py copies this file out of the repository, too.
"""

from pathlib import Path

from ml_collections import ConfigDict

from composer_jax.models.config import ModelConfig
from composer_jax.schema.run_config import RunConfig, config_dict

OWN = "own_extensions:"
MODEL = ModelConfig(
    vocab_size=512,
    d_model=32,
    n_layers=2,
    n_dense_layers=1,
    n_heads=4,
    n_kv_heads=2,
    qk_rope_dim=8,
    v_head_dim=8,
    dense_ff_dim=32,
    expert_ff_dim=16,
    n_experts=4,
    experts_per_token=2,
    max_context=256,
    tie_embeddings=True,
    compute_dtype="float32",
    remat=False,
    attention=f"{OWN}ScaledAttention",
    dispatch=f"{OWN}recorded_dispatch",
    init=f"{OWN}halved",
)


def get_config() -> ConfigDict:
    config = config_dict(RunConfig(MODEL))
    config.metric_sinks = (f"{OWN}RowCount",)
    config.mesh.cpu_devices = 1
    config.data.update({"max_bytes": 100_000, "max_heldout_bytes": 4_000, "tokenizer_bytes": 100_000})
    config.data.chat_format = f"{OWN}RecordedFormat"
    config.tasks.families = {"offset": f"{OWN}Offset"}
    config.tasks.heldout = str(Path(__file__).with_name("tasks.seeds"))
    config.tasks.formats = (f"{OWN}read_seeds",)
    config.tasks.tools = (f"{OWN}COUNT_LINES", "finish")
    config.pretrain.update({"steps": 2, "batch_size": 2, "seq_len": 64, "save_every": 2, "evaluate_every": 2})
    config.pretrain.sources = {"counting": {"kind": f"{OWN}counting_rows", "options": {"stride": 3}}}
    config.pretrain.loss.name = f"{OWN}recorded_loss"
    config.sft.update({"steps": 2, "batch_size": 2, "seq_len": 64, "save_every": 2})
    config.sft.sources = {"solutions": {"kind": f"{OWN}Solutions", "options": {"count": 8}}}
    config.agent.limits.update({"max_turns": 2, "max_turn_tokens": 8, "max_episode_tokens": 128})
    config.agent.concurrency = 2
    config.sampler.update({"slots": 2, "max_model_len": 128, "prefill_shapes": ((2, 32),), "decode_rows": ()})
    config.rl.update({"steps": 1, "group_size": 2, "batches": ((128, 2),), "compaction": "none"})
    config.rl.groups = {"offset": 1}
    config.rl.algorithm = {"name": f"{OWN}FixedBaseline", "options": {"baseline": 0.5}}
    config.rl.reward.behaviors = {"cut_messages": f"{OWN}cut_messages"}
    config.rl.reward.penalties = {"cut_messages": 0.1}
    config.rl.optimizer.name = f"{OWN}momentum"
    config.evaluate.suites = {"offsets": {"family": "offset", "tasks": 2, "attempts": 1}}
    config.evaluate.headline = ("offsets",)
    config.evaluate.update({"heldout_attempts": 1, "heldout_compaction": "none"})
    return config
