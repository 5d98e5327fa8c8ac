"""Moonlight (16 billion parameters, 3 active) on a small slice of TPUs: what a run of it would need.

    python -m launch.compile --config=configs/moonlight.py:v5e --topology=v5e:8x8 --stage=pretrain
    python -m launch.compile --config=configs/moonlight.py:v6e --topology=v6e:4x4 --stage=pretrain

The architecture is the published one (models/presets.py). Layout, batch and optimizer are ours (not published).
"""

import dataclasses

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from composer_jax.errors import UserError
from composer_jax.models.presets import PRESETS

# Rows of a batch and slots of the sampler for the slices in the docstring: four or eight of each for every device.
SLICES = {"v5e": {"expert": 8, "rows": 256, "slots": 256}, "v6e": {"expert": 4, "rows": 128, "slots": 128}}


def get_config(chip: str = "v6e") -> ConfigDict:
    """chip: which of the two slices in the docstring."""
    if chip not in SLICES:
        raise UserError(f"configs/moonlight.py has no chip {chip!r}; use {', '.join(SLICES)}.")
    sizes = SLICES[chip]
    model = dataclasses.asdict(PRESETS["moonlight_16b_a3b"])
    model |= {
        "param_dtype": "bfloat16",
        "compute_dtype": "bfloat16",
        "dispatch": "ring",
        "capacity_factor": 1.25,
        "remat": True,
        "head_chunk": 2048,
        "expert_chunk": 4096,
        "heads_at_once": placeholder(int),
    }
    return ConfigDict(
        {
            "model": model,
            "mesh": {"replica": 1, "data": -1, "expert": sizes["expert"], "context": 1, "tensor": 1},
            "batch": {"rows": sizes["rows"], "seq_len": 2048, "accumulate": 1},
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
                "batch": {"rows": sizes["rows"], "seq_len": 2048, "accumulate": 1},
                "ratio_low": 0.2,
                "ratio_high": 0.28,
            },
            "decode": {
                "mesh": {"replica": -1, "data": 1, "expert": sizes["expert"], "context": 1, "tensor": 1},
                "param_dtype": "bfloat16",
                "slots": sizes["slots"],
                "capacity": 8192,
            },
        }
    )
