"""Memory chain: RL learns which item to carry through three summaries, from a reward at the end only.

    python -m launch.pipeline --config=memory_chain --workdir=runs/chain                # summaries trained
    python -m launch.pipeline --config=memory_chain --workdir=runs/frozen --config.rl.compaction=untrained

A network of 0.27 million parameters learns the protocol by SFT from a scripted expert, without pretraining, and then RL
teaches it what to keep. `python -m benchmarks.memory_chain` compares RL with the same RL whose summaries are left out
of the loss. Numbers are ours (not published); `--help` lists every field.
"""

from typing import Any

from ml_collections import ConfigDict

from composer_jax.demo.prompts import REQUESTS
from composer_jax.errors import UserError
from composer_jax.schema.run_config import default_config

SIZES = ("full", "smoke")

MODEL = dict(
    vocab_size=512,
    d_model=96,
    n_layers=2,
    n_dense_layers=1,
    n_heads=4,
    kv_lora_rank=48,
    qk_nope_dim=32,
    qk_rope_dim=16,
    v_head_dim=24,
    dense_ff_dim=192,
    expert_ff_dim=32,
    n_experts=4,
    experts_per_token=2,
    n_shared_experts=1,
    routed_scaling_factor=1.0,
    rope_theta=10_000.0,
    max_context=512,
    tie_embeddings=True,
    embedding_taps=3,
    attention_scale=1.0,
    init="composer_jax.demo.induction:apply_induction",
    dispatch="dense",
    compute_dtype="float32",
    scan_unroll=2,
    remat=False,
)

TRIGGER = 64
"""Tokens of context. The first branch exceeds them with its second file, the later ones, which begin with a summary, as
well, so that summaries follow the files 2, 4 and 6 of a chain of 8 steps; the last branch ends before it does."""
SUMMARY_TOKENS = 14
"""Tokens of the longest summary: those of one item and the next file. Two items and the file take 18."""


def get_config(size: str = "full") -> ConfigDict:
    """size: "full" or "smoke" (seconds per stage)."""
    if size not in SIZES:
        raise UserError(f"configs/memory_chain.py has no size {size!r}; use {', '.join(SIZES)}.")
    config: Any = default_config(MODEL)  # Any: a ConfigDict types its sections as plain values
    config.stages = ("sft", "rl")
    # Two independent replicas on two cores, gradients added by the host: no collective, so nothing can stall.
    config.mesh.update({"cpu_devices": 2, "reduction": "host"})
    config.data.tokenizer_bytes = 1  # one file of source code; the chains are the rest
    config.data.tokenizer_texts = {"chains": {"kind": "composer_jax.demo.memory_chain_texts:chain_texts", "count": 400}}
    config.tasks.families = {"memory_chain": "composer_jax.demo.memory_chain:MemoryChain"}
    config.sft.sources = {
        "chains": {
            "kind": "composer_jax.demo.expert_traces:ExpertTraces",
            "options": {"traces": {"chain": 1200, "chain_start": 600}},
        }
    }
    config.sft.update({"steps": 600, "batch_size": 16, "seq_len": 256, "save_every": 200})
    config.sft.optimizer.update({"peak": 2.5e-3, "warmup": 20, "final": 0.05})
    set_agent(config)
    set_rl(config.rl)
    config.evaluate.suites = {"chain": {"family": "memory_chain", "tasks": 64, "attempts": 4, "compaction": "short"}}
    config.evaluate.update({"headline": ("chain",), "heldout_compaction": "short", "recorded_tasks": 8})
    if size == "smoke":
        shrink(config)
    return config


def set_agent(config: Any) -> None:
    short = {
        **config.agent.compactions.none,  # the other fields, so that flags can set them
        "trigger": TRIGGER,
        "request": REQUESTS["short"],
        "max_segments": 4,
        "max_summary_tokens": SUMMARY_TOKENS,
    }
    config.agent.compactions = {
        "none": config.agent.compactions.none,
        "short": short,
        # The control: RL plays the same and trains everything but the summaries.
        "untrained": {**short, "train_summaries": False},
    }
    # A chain takes 8 messages: none is left to read a file a second time after the last one has asked for its item.
    config.agent.limits.update({"max_turns": 8, "max_turn_tokens": 48, "max_episode_tokens": 480})
    config.agent.concurrency = 96
    config.sampler.update(
        {"slots": 96, "max_model_len": 112, "page_size": 16, "decode_steps": 8, "prefill_shapes": ((48, 20), (16, 64))}
    )


def set_rl(rl: Any) -> None:
    rl.groups.update({"memory_chain": 12})
    rl.update(
        {"steps": 40, "group_size": 8, "compaction": "short", "tokens_per_episode": 64.0, "batches": ((112, 32),)}
    )
    rl.optimizer.update({"peak": 3e-4, "warmup": 3, "decay": "linear", "final": 0.1, "b2": 0.98, "weight_decay": 0.0})


def shrink(config: Any) -> None:
    """Every stage in its smallest form: the same code, too short to learn much."""
    config.sft.update({"steps": 4, "save_every": 4})
    config.sft.sources.chains.options.traces = {"chain": 8, "chain_start": 16}
    config.rl.update({"steps": 2, "group_size": 2, "save_every": 1, "record_every": 1})
    config.rl.groups.memory_chain = 2
    config.evaluate.suites.chain.update({"tasks": 4, "attempts": 2})
    config.evaluate.recorded_tasks = 2
