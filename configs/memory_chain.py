"""Memory chain: RL learns which item to carry through three summaries, from a reward at the end only.

    python -m launch.pipeline --config=memory_chain --workdir=runs/chain                # summaries trained
    python -m launch.pipeline --config=memory_chain --workdir=runs/frozen --config.rl.compaction=untrained

A network of 0.27 million parameters learns the protocol by SFT from a scripted expert, without pretraining, and then RL
teaches it what to keep. `python -m benchmarks.memory_chain` compares RL with the same RL whose summaries are left out
of the loss. Numbers are ours (not published); `--help` lists every field.
"""

from functools import partial

from ml_collections import ConfigDict

from composer_jax.demo.prompts import REQUESTS
from composer_jax.errors import UserError
from composer_jax.schema import sections as cfg

SIZES = ("full", "smoke")

TRIGGER = 64
"""Tokens of context. The first branch exceeds them with its second file, the later ones, which begin with a summary, as
well, so that summaries follow the files 2, 4 and 6 of a chain of 8 steps; the last branch ends before it does."""
SUMMARY_TOKENS = 14
"""Tokens of the longest summary: those of one item and the next file. Two items and the file take 18."""


def get_config(size: str = "full") -> ConfigDict:
    """size: "full" or "smoke" (seconds per stage)."""
    if size not in SIZES:
        raise UserError(f"configs/memory_chain.py has no size {size!r}; use {', '.join(SIZES)}.")
    full = size == "full"
    texts = {"chains": cfg.TokenizerTextConfig("composer_jax.demo.texts:chain_texts", count=400)}
    chain = cfg.SuiteConfig("memory_chain", tasks=64 if full else 4, attempts=4 if full else 2, compaction="short")
    return cfg.config_dict(
        cfg.RunConfig(
            model=MODEL,
            stages=("sft", "rl"),
            # Two independent replicas on two cores, gradients added by the host: no collective, so nothing can stall.
            mesh=cfg.MeshConfig(cpu_devices=2, reduction="host"),
            # One file of source code; the chains are the rest.
            data=cfg.DataConfig(tokenizer_bytes=1, tokenizer_texts=texts),
            tasks=cfg.TasksConfig(families={"memory_chain": "composer_jax.demo.memory_chain:MemoryChain"}),
            pretrain=cfg.PretrainConfig(seq_len=MODEL.max_context),
            sft=fine_tuning(full),
            agent=agent(),
            sampler=cfg.SamplerConfig(slots=96, max_model_len=112, page_size=16, prefill_shapes=((48, 20), (16, 64))),
            rl=reinforcement_learning(full),
            evaluate=cfg.EvaluateConfig(
                suites={"chain": chain},
                headline=("chain",),
                heldout_compaction="short",
                recorded_tasks=8 if full else 2,
            ),
        )
    )


MODEL = cfg.ModelConfig(
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
    max_context=512,
    tie_embeddings=True,
    embedding_taps=3,
    init="composer_jax.demo.induction:apply_induction",
    dispatch="dense",
    compute_dtype="float32",
    scan_unroll=2,
    remat=False,
)


def agent() -> cfg.AgentConfig:
    short = partial(cfg.Compaction, TRIGGER, REQUESTS["short"], max_segments=4, max_summary_tokens=SUMMARY_TOKENS)
    return cfg.AgentConfig(
        # A chain takes 8 messages: none is left to read a file a second time after the last one has asked for its item.
        limits=cfg.EpisodeLimits(max_turns=8, max_turn_tokens=48, max_episode_tokens=480),
        compactions={
            "none": cfg.Compaction(),
            "short": short(),
            # The control: RL plays the same and trains everything but the summaries.
            "untrained": short(train_summaries=False),
        },
        concurrency=96,
    )


def fine_tuning(full: bool) -> cfg.SFTConfig:
    traces = {"chain": 1200, "chain_start": 600} if full else {"chain": 8, "chain_start": 16}
    return cfg.SFTConfig(
        sources={"chains": cfg.TraceSourceConfig("composer_jax.demo.expert_traces:ExpertTraces", {"traces": traces})},
        steps=600 if full else 4,
        batch_size=16,
        seq_len=256,
        save_every=200 if full else 4,
        optimizer=cfg.OptimizerConfig(peak=2.5e-3, warmup=20, final=0.05),
    )


def reinforcement_learning(full: bool) -> cfg.RLConfig:
    return cfg.RLConfig(
        steps=40 if full else 2,
        groups=cfg.DISK_FAMILIES | {"memory_chain": 12 if full else 2},
        group_size=8 if full else 2,
        compaction="short",
        tokens_per_episode=64.0,
        batches=((112, 32),),
        optimizer=cfg.OptimizerConfig(peak=3e-4, warmup=3, decay="linear", final=0.1, b2=0.98, weight_decay=0.0),
        save_every=20 if full else 1,
        record_every=20 if full else 1,
    )
