"""Moonlight (16 billion parameters, 3 active) on a small slice of TPUs.

    python -m launch.compile --config=moonlight:v5e --topology=v5e:8x8 --stage=pretrain
    python -m launch.compile --config=moonlight:v6e --topology=v6e:4x4 --stage=pretrain

The architecture is the published one (models/presets.py). Layout, batch and optimizer are ours (not published).
"""

import dataclasses

from ml_collections import ConfigDict

from composer_jax.errors import UserError
from composer_jax.schema import sections as cfg

# Rows of a batch and slots of the sampler on the slices above: four or eight of each per device.
SLICES = {"v5e": {"expert": 8, "rows": 256, "slots": 256}, "v6e": {"expert": 4, "rows": 128, "slots": 128}}
TOKENS = 2048
"""Tokens of a row."""
CAPACITY = 8192
"""Tokens of the longest episode that the sampler holds; RL trains on rows of this length as well."""


def get_config(chip: str = "v6e") -> ConfigDict:
    """chip: one of the two slices above."""
    if chip not in SLICES:
        raise UserError(f"configs/moonlight.py has no chip {chip!r}; use {', '.join(SLICES)}.")
    sizes = SLICES[chip]
    model = dataclasses.replace(
        cfg.PRESETS["moonlight_16b_a3b"],
        param_dtype="bfloat16",
        capacity_factor=1.25,
        head_chunk=2048,
        expert_chunk=4096,
    )
    rows = sizes["rows"]
    optimizer = cfg.OptimizerConfig(peak=1e-5, warmup=100, final=0.1)
    return cfg.config_dict(
        cfg.RunConfig(
            model=model,
            mesh=cfg.MeshConfig(replica=1, data=-1, expert=sizes["expert"]),
            pretrain=cfg.PretrainConfig(batch_size=rows, seq_len=TOKENS, optimizer=optimizer),
            sft=cfg.SFTConfig(batch_size=rows, seq_len=TOKENS, optimizer=optimizer),
            sampler=cfg.SamplerConfig(
                slots=sizes["slots"],
                max_model_len=CAPACITY,
                # The default of sixteen rows a device would take 15.8 GiB on v5e, which has 15.75.
                prefill_shapes=((4, 128), (1, 1024)),
                mesh=cfg.MeshConfig(expert=sizes["expert"]),
                param_dtype="bfloat16",
            ),
            rl=cfg.RLConfig(batches=((TOKENS, rows), (CAPACITY, rows * TOKENS // CAPACITY)), optimizer=optimizer),
        )
    )
