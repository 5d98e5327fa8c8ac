r"""Kimi K2.5 (1.03 trillion parameters) on 1,024 TPU v5p, or on 512 with the moments in the hosts' memory.

    python -m launch.compile --config=kimi_k2_5:32k --topology=v5p:8x8x16 --stage=pretrain
    python -m launch.compile --config=kimi_k2_5:phases --topology=v5p:8x8x16 --stage=long_context
    python -m launch.compile --config=kimi_k2_5:32k --topology=v5p:8x8x8 --stage=pretrain \
        --config.pretrain.batch_size=256 --config.pretrain.optimizer.offload=true

The architecture is the published one (models/presets.py). Layout, batch and optimizer are ours (not published).
"""

import dataclasses
from functools import partial

from ml_collections import ConfigDict

from composer_jax.errors import UserError
from composer_jax.schema import sections as cfg

# Tokens of a row, and the devices that share one: every device has 16 thousand tokens of each step.
LENGTHS = {"4k": (4096, 1), "8k": (8192, 1), "32k": (32_768, 2), "256k": (262_144, 16)}
TOKENS = 1024 * 16_384
"""Tokens of a batch."""
PHASES = "phases"


def get_config(length: str = "32k") -> ConfigDict:
    """length: tokens of a training row and of a conversation's context, or "phases" (`phases` below)."""
    if length not in (*LENGTHS, PHASES):
        raise UserError(f"configs/kimi_k2_5.py has no length {length!r}; use {', '.join((*LENGTHS, PHASES))}.")
    return cfg.config_dict(phases() if length == PHASES else run(length))


OPTIMIZER = cfg.OptimizerConfig(peak=1e-5, warmup=100, final=0.1)


def run(length: str) -> cfg.RunConfig:
    tokens, context = LENGTHS[length]
    batch_size = TOKENS // tokens
    short = tokens <= 32_768
    return cfg.RunConfig(
        model=dataclasses.replace(
            cfg.PRESETS["kimi_k2_5"],
            capacity_factor=1.25,
            head_chunk=2048,
            heads_at_once=8 if context > 2 else None,  # a long row has many more keys than a device has tokens
            remat_saves=("attention",),
        ),
        mesh=cfg.MeshConfig(replica=1, data=-1, expert=8, context=context),
        pretrain=cfg.PretrainConfig(batch_size=batch_size, seq_len=tokens, optimizer=OPTIMIZER),
        sft=cfg.SFTConfig(batch_size=batch_size, seq_len=tokens, optimizer=OPTIMIZER),
        sampler=cfg.SamplerConfig(
            slots=1024 if short else 384,
            max_model_len=tokens,
            # A longer prompt takes several calls; the other rows decode between them.
            prefill_shapes=((4, 128), (1, 1024)) if short else ((1, 512),),
            # A replica is 128 chips with three experts each: no weight is gathered during decoding.
            mesh=cfg.MeshConfig(expert=16, tensor=8),
            param_dtype="bfloat16",
        ),
        rl=cfg.RLConfig(batches=((tokens, batch_size),), optimizer=OPTIMIZER),
    )


def phases() -> cfg.RunConfig:
    """Continued pretraining as Composer 2 published it (arXiv 2603.24477, section 3): most of it on rows of 32k, then
    the MTP module alone, a shorter phase on rows of 256k and SFT, both with the module. RL has a context of 256k.

    The numbers of steps are ours (not published).
    """
    long, short = run("256k"), run("32k")
    model = {"heads_at_once": short.model.heads_at_once}
    pretrain = dataclasses.replace(short.pretrain, mesh=short.mesh, model=model)
    rows, tokens = pretrain.batch_size, pretrain.seq_len
    module = cfg.LanguageLossConfig(mtp_weight=1.0, trained="mtp")
    with_module = cfg.LanguageLossConfig(mtp_weight=0.1)
    phase = partial(cfg.PhaseConfig, steps=200, optimizer=OPTIMIZER)
    return dataclasses.replace(
        long,
        model=dataclasses.replace(long.model, n_mtp_modules=1),
        stages=("pretrain", "mtp", "long_context", "sft", "rl"),
        pretrain=pretrain,
        phases={
            "mtp": phase(
                batch_size=rows, seq_len=tokens, mesh=short.mesh, model=model, loss=module, router_bias_update_rate=0.0
            ),
            "long_context": phase(batch_size=long.pretrain.batch_size, seq_len=long.pretrain.seq_len, loss=with_module),
        },
        sft=dataclasses.replace(short.sft, mesh=short.mesh, model=model, loss=with_module),
    )
