r"""Qwen3-30B-A3B (30 billion parameters, 3 active) becomes an agent on a slice of TPUs.

    python -m launch.compile --config=qwen3_30b_a3b --topology=v5p:4x4x4 --stage=rl
    python -m launch.sft --config=qwen3_30b_a3b --config.base=hf:MODEL --config.sft.data=TRACES --workdir=DIR
    python -m launch.rl --config=qwen3_30b_a3b --config.base=hf:MODEL --config.sft.data=TRACES --workdir=DIR \
        --config.tasks.train=TASKS --config.rl.groups.repository=16

The architecture is the published one (models/presets.py); `qwen3_30b_a3b:coder` is Qwen3-Coder-30B-A3B. Layout, batch
and optimizer are ours (not published).
"""

import dataclasses

from ml_collections import ConfigDict

from composer_jax.agent.prompts.system import SYSTEM
from composer_jax.errors import UserError
from composer_jax.schema import sections as cfg

KINDS = {"instruct": "qwen3_30b_a3b", "coder": "qwen3_coder_30b_a3b"}
CONTEXT = 32_768
"""Tokens of the longest episode, which the sampler holds and RL trains on."""
SHORT = 8192
"""Tokens of SFT rows and of the shorter rows of RL."""


def get_config(kind: str = "instruct") -> ConfigDict:
    """kind: one of KINDS."""
    if kind not in KINDS:
        raise UserError(f"configs/qwen3_30b_a3b.py has no kind {kind!r}; use {', '.join(KINDS)}.")
    model = dataclasses.replace(
        cfg.PRESETS[KINDS[kind]], param_dtype="bfloat16", capacity_factor=1.25, head_chunk=2048, expert_chunk=8192
    )
    optimizer = cfg.OptimizerConfig(peak=1e-5, warmup=20, final=0.1)
    limits = cfg.EpisodeLimits(max_turns=100, max_episode_tokens=4 * CONTEXT)
    return cfg.config_dict(
        cfg.RunConfig(
            model=model,
            stages=("sft", "rl"),
            mesh=cfg.MeshConfig(replica=1, data=-1, expert=8),
            # The family stores no selection bias of the router.
            pretrain=cfg.PretrainConfig(
                batch_size=128, seq_len=SHORT, router_bias_update_rate=0.0, optimizer=optimizer
            ),
            sft=cfg.SFTConfig(batch_size=128, seq_len=SHORT, router_bias_update_rate=0.0, optimizer=optimizer),
            agent=cfg.AgentConfig(limits, system_prompt=SYSTEM),
            sampler=cfg.SamplerConfig(
                slots=256,
                max_model_len=CONTEXT,
                prefill_shapes=((4, 128), (1, 2048)),
                # A replica is eight devices with sixteen experts each: no weight is gathered during decoding.
                mesh=cfg.MeshConfig(expert=8),
                param_dtype="bfloat16",
            ),
            rl=cfg.RLConfig(trigger=(20_480, 24_576), batches=((SHORT, 128), (CONTEXT, 64)), optimizer=optimizer),
        )
    )
