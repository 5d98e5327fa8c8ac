"""Kimi K2.5 (1.03 trillion parameters) on 1,024 TPU v5p: what a run of it would need.

    python -m launch.compile --config=configs/kimi_k2_5.py:32k --topology=v5p:8x8x16 --stage=pretrain

The architecture is the published one (models/presets.py). Layout, batch and optimizer are ours (not published).
"""

import dataclasses

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from composer_jax.errors import UserError
from composer_jax.models.presets import PRESETS

# Tokens of a row, and how many devices share one: 16 thousand tokens of every step are on each.
LENGTHS = {"4k": (4096, 1), "8k": (8192, 1), "32k": (32_768, 2), "256k": (262_144, 16)}
TOKENS = 1024 * 16_384
"""Of a batch."""


def get_config(length: str = "32k") -> ConfigDict:
    """length: tokens of a training row and of a conversation's context."""
    if length not in LENGTHS:
        raise UserError(f"configs/kimi_k2_5.py has no length {length!r}; use {', '.join(LENGTHS)}.")
    tokens, context = LENGTHS[length]
    batch = {"rows": TOKENS // tokens, "seq_len": tokens, "accumulate": 1}
    return ConfigDict(
        {
            "model": dataclasses.asdict(PRESETS["kimi_k2_5"]) | compute(long=context > 2),
            "mesh": {"replica": 1, "data": -1, "expert": 8, "context": context, "tensor": 1},
            "batch": batch,
            "optimizer": {
                "peak": 1e-5,
                "warmup": 100,
                "decay": "cosine",
                "final": 0.1,
                "b2": 0.95,
                "weight_decay": 0.1,
                "clip": 1.0,
            },
            "pretrain": {"mtp_weight": 0.0, "bias_rate": 1e-3},
            "rl": {
                "batch": dict(batch),
                "ratio_low": 0.2,
                "ratio_high": 0.28,
            },
            # A replica is 128 chips with three experts each: no weight is gathered while tokens wait for it.
            "decode": {
                "mesh": {"replica": -1, "data": 1, "expert": 16, "context": 1, "tensor": 8},
                "param_dtype": "bfloat16",
                "slots": 1024 if tokens <= 32_768 else 384,
                "capacity": tokens,
            },
        }
    )


def compute(*, long: bool) -> dict:
    """How the network is computed, as opposed to what it is. long: a row has many more keys than a device tokens."""
    return {
        "param_dtype": "float32",
        "compute_dtype": "bfloat16",
        "dispatch": "ring",
        "capacity_factor": 1.25,
        "head_chunk": 2048,
        "expert_chunk": placeholder(int),  # none of it, and settable on the command line
        "heads_at_once": 8 if long else placeholder(int),
        "remat": True,
        "remat_saves": ("attention",),
    }
