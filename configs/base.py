"""Any published model as an agent: the network comes from --config.base, everything else is a default to change.

    python -m launch.evaluate --config.base=hf:DIR --config.tasks.heldout=TASKS --workdir=runs/before
    python -m launch.sft --config.base=hf:DIR --config.sft.data=traces.jsonl --workdir=runs/mine

This is the config of a command that names a base and no --config. Sizes are for a context of 32 thousand tokens, or of
as many as the base allows, on as many devices as there are; `--config=base:8192` chooses another length. Numbers are
ours (not published).
"""

from ml_collections import ConfigDict

from composer_jax.agent.prompts.system import SYSTEM
from composer_jax.errors import UserError
from composer_jax.schema import sections as cfg

CONTEXT = 32_768
SHORTEST = 1024


def get_config(context: str = str(CONTEXT)) -> ConfigDict:
    """context: tokens of the longest episode, which the sampler holds and RL trains on."""
    if not context.isdigit() or int(context) < SHORTEST:
        raise UserError(f"configs/base.py takes a context of at least {SHORTEST} tokens, not {context!r}.")
    tokens = int(context)
    optimizer = cfg.OptimizerConfig(peak=1e-5, warmup=10, final=0.1)
    summary = cfg.Compaction(3 * tokens // 4, max_summary_tokens=min(1024, tokens // 8))
    limits = cfg.EpisodeLimits(max_turn_tokens=min(2048, tokens // 8), max_episode_tokens=2 * tokens)
    return cfg.config_dict(
        cfg.RunConfig(
            model=cfg.ModelOfBase(head_chunk=2048),
            stages=("sft", "rl"),
            # Most families of published models store no selection bias of the router.
            pretrain=cfg.PretrainConfig(seq_len=tokens, router_bias_update_rate=0.0, optimizer=optimizer),
            sft=cfg.SFTConfig(seq_len=tokens, router_bias_update_rate=0.0, optimizer=optimizer),
            agent=cfg.AgentConfig(limits, {"none": cfg.Compaction(), "summary": summary}, system_prompt=SYSTEM),
            sampler=cfg.SamplerConfig(max_model_len=tokens, prefill_shapes=((4, 128), (1, 1024))),
            rl=cfg.RLConfig(trigger=(5 * tokens // 8, 3 * tokens // 4), batches=((tokens, 8),), optimizer=optimizer),
        )
    )
