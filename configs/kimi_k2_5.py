r"""Kimi K2.5 (1.03 trillion parameters) on 1,024 TPU v5p, or on 512 with the moments in the hosts' memory.

    python -m launch.compile --config=kimi_k2_5:32k --topology=v5p:8x8x16 --stage=pretrain
    python -m launch.compile --config=kimi_k2_5:phases --topology=v5p:8x8x16 --stage=long_context
    python -m launch.compile --config=kimi_k2_5:32k --topology=v5p:8x8x8 --stage=pretrain \
        --config.pretrain.batch_size=256 --config.pretrain.optimizer.offload=true

The architecture is the published one (models/presets.py). Layout, batch and optimizer are ours (not published).
"""

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from composer_jax.errors import UserError
from composer_jax.models.presets import PRESETS
from composer_jax.schema.run_config import default_config

# Tokens of a row, and the devices that share one: every device has 16 thousand tokens of each step.
LENGTHS = {"4k": (4096, 1), "8k": (8192, 1), "32k": (32_768, 2), "256k": (262_144, 16)}
TOKENS = 1024 * 16_384
"""Tokens of a batch."""
PHASES = "phases"


def get_config(length: str = "32k") -> ConfigDict:
    """length: tokens of a training row and of a conversation's context, or "phases" (`phases` below)."""
    if length == PHASES:
        return phases()
    if length not in LENGTHS:
        raise UserError(f"configs/kimi_k2_5.py has no length {length!r}; use {', '.join((*LENGTHS, PHASES))}.")
    tokens, context = LENGTHS[length]
    model = dataclasses.replace(
        PRESETS["kimi_k2_5"],
        capacity_factor=1.25,
        head_chunk=2048,
        heads_at_once=8 if context > 2 else None,  # a long row has many more keys than a device has tokens
        remat_saves=("attention",),
    )
    config: Any = default_config(model)  # Any: a ConfigDict types its sections as plain values
    config.mesh.update({"replica": 1, "data": -1, "expert": 8, "context": context})
    for stage in (config.pretrain, config.sft):
        stage.update({"batch_size": TOKENS // tokens, "seq_len": tokens})
    for stage in (config.pretrain, config.sft, config.rl):
        stage.optimizer.update({"peak": 1e-5, "warmup": 100, "final": 0.1})
    config.rl.batches = ((tokens, TOKENS // tokens),)
    # A replica is 128 chips with three experts each: no weight is gathered during decoding.
    config.sampler.mesh = dict(config.mesh) | {"replica": -1, "data": 1, "expert": 16, "context": 1, "tensor": 8}
    config.sampler.update(
        {"slots": 1024 if tokens <= 32_768 else 384, "max_model_len": tokens, "param_dtype": "bfloat16"}
    )
    # A prefill call copies the whole contexts of its rows: 5 GiB a row of 32k.
    config.sampler.update({"prefill_shapes": ((4, 128), (1, 1024)) if tokens <= 32_768 else ((1, 512),)})
    return config


def phases() -> ConfigDict:
    """Continued pretraining as Composer 2 published it (arXiv 2603.24477, section 3): most of it on rows of 32k, then
    the MTP module alone, a shorter phase on rows of 256k and SFT, both with the module. RL has a context of 256k.

    The numbers of steps are ours (not published).
    """
    config: Any = get_config("256k")
    config.model.n_mtp_modules = 1
    short: Any = get_config("32k")
    long_context = config.pretrain.copy_and_resolve_references()
    for stage in (config.pretrain, config.sft):
        stage.update({"batch_size": short.pretrain.batch_size, "seq_len": short.pretrain.seq_len})
        stage.mesh = short.mesh
        stage.model = {"heads_at_once": short.model.heads_at_once}
    mtp = config.pretrain.copy_and_resolve_references()
    mtp.update({"steps": 200, "router_bias_update_rate": 0.0})
    mtp.loss.update({"mtp_weight": 1.0, "trained": "mtp"})
    long_context.steps = 200
    for stage in (long_context, config.sft):
        stage.loss.mtp_weight = 0.1
    config.phases = {"mtp": mtp, "long_context": long_context}
    config.stages = ("pretrain", "mtp", "long_context", "sft", "rl")
    return config
