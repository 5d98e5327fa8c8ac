"""The whole pipeline on one CPU: a K2-shaped model of about a million parameters that learns to fix bugs.

    python -m launch.pipeline --config=configs/tiny.py --workdir=runs/tiny          # on two cores: see README
    python -m launch.pipeline --config=configs/tiny.py:smoke --workdir=runs/smoke   # every stage in minutes, learns
    little
    python -m launch.pipeline --config=configs/tiny.py:sharded --workdir=runs/sharded  # smoke on 8 fake devices

What K2 does not have is listed under "extras" in the model section. Numbers are ours (not published) unless said.
"""

from ml_collections import ConfigDict

from composer_jax.errors import UserError

SIZES = ("full", "smoke", "sharded")
GIVEN = {"repository": 0, "harbor": 0, "swe_bench": 0, "swe_smith": 0}  # families that tasks.train may hold


def get_config(size: str = "full") -> ConfigDict:
    """size: "full" (the demo), "smoke" (seconds per stage), "sharded" (smoke on 8 CPU devices: expert=2,
    context=2, tensor=2)."""
    if size not in SIZES:
        raise UserError(f"configs/tiny.py has no size {size!r}; use {', '.join(SIZES)}.")
    config = ConfigDict(
        {
            "seed": 0,
            "model": model(),
            # Two independent replicas on two cores, gradients added by the host: no collective, so nothing can stall.
            "mesh": {
                "cpu_devices": 2,
                "replica": -1,
                "data": 1,
                "expert": 1,
                "context": 1,
                "tensor": 1,
                "reduction": "host",
            },
            "data": {
                "source": "",
                "extensions": (".py",),
                "max_bytes": 4_000_000,
                "max_heldout_bytes": 60_000,
                "tokenizer_bytes": 2_000_000,
                "tokenizer_tasks": 600,
            },
            "tasks": {"train": "", "heldout": "", "repos": "", "packages": ""},
            "pretrain": {
                "steps": 400,
                "batch_size": 16,
                "seq_len": 256,
                "copy_fraction": 0.2,
                "exercise_fraction": 0.4,
                "exercises": 6000,
                "mtp_weight": 0.1,
                "balance_weight": 0.0,
                "bias_rate": 1e-3,
                "evaluate_every": 100,
                "save_every": 100,
                "optimizer": adamw(peak=3e-3, warmup=20, decay="cosine", final=0.3),
            },
            "sft": {
                "traces": {
                    "bugfix": 3600,
                    "recall_short": 800,
                    "recall_long": 200,
                    "recall_uncompacted": 400,
                },
                "rates": {},
                "exercises": 7000,
                "steps": 1200,
                "batch_size": 8,
                "seq_len": 512,
                "bias_rate": 1e-3,
                "save_every": 200,
                "optimizer": adamw(peak=2.5e-3, warmup=20, decay="cosine", final=0.05),
            },
            "agent": {
                "max_turns": 10,
                "max_turn_tokens": 64,
                "max_episode_tokens": 1600,
                "trigger": 132,
                "max_segments": 5,
                "max_summary_tokens": 64,
                "max_report_tokens": 200,
                "concurrency": 64,
            },
            "sampler": {
                "slots": 64,
                "capacity": 512,
                "decode_steps": 8,
                "prefill_shapes": ((16, 32), (4, 128)),
                "decode_rows": (8,),
                "windows": (256,),
            },
            "rl": {
                "steps": 110,
                "groups": {"bugfix": 5, "recall": 3, **GIVEN},
                "group_size": 8,
                "trigger": (126, 140),
                "uncompacted_share": 0.15,
                "tokens_per_episode": 64.0,
                "batches": ((256, 16), (512, 2)),
                "ratio_low": 0.2,
                "ratio_high": 0.28,
                "save_every": 20,
                "record_every": 20,
                "reward": {
                    "weight": 0.1,
                    "summary_token": 0.1,
                    "turn": 0.0,
                    "k": 1.0,
                    "q": 0.5,
                    "zeroed": (),
                },
                "optimizer": adamw(peak=3e-4, warmup=5, decay="linear", final=0.2, b2=0.98, weight_decay=0.0),
            },
            "evaluate": {"tasks": 32, "attempts": 8, "other_attempts": 4, "recorded_tasks": 6},
        }
    )
    if size != "full":
        config.update(smoke())
    if size == "sharded":
        config.mesh.update({"cpu_devices": 8, "replica": 1, "expert": 2, "context": 2, "tensor": 2})
        config.mesh.reduction = "collective"
        config.model.dispatch = "ring"
    return config


def model() -> dict:
    return dict(
        vocab_size=1024,
        d_model=128,
        n_layers=4,
        n_dense_layers=1,
        n_heads=4,
        kv_lora_rank=64,
        qk_nope_dim=48,
        qk_rope_dim=16,
        v_head_dim=32,
        dense_ff_dim=256,
        expert_ff_dim=32,
        n_experts=8,
        experts_per_token=2,
        n_shared_experts=2,
        routed_scaling_factor=1.0,
        rope_theta=10_000.0,
        max_context=1024,
        tie_embeddings=True,
        n_mtp_modules=1,
        # Extras: K2 has none of these two; the initialisation is a starting point, not an architecture.
        embedding_taps=3,
        attention_scale=1.0,
        init="composer_jax.demo.induction:apply_induction",
        dispatch="dense",
        compute_dtype="float32",
        scan_unroll=4,
        remat=False,
    )


def adamw(**changes) -> dict:
    """AdamW as DeepSeek-V3 has it where nothing else is said."""
    return {
        "peak": 1e-3,
        "warmup": 0,
        "decay": "cosine",
        "final": 0.0,
        "b2": 0.95,
        "weight_decay": 0.1,
        "clip": 1.0,
    } | changes


def smoke() -> dict:
    """Every stage in its smallest form: same code, too short to learn much."""
    return {
        "data": {
            "max_bytes": 400_000,
            "max_heldout_bytes": 20_000,
            "tokenizer_bytes": 400_000,
            "tokenizer_tasks": 100,
        },
        "pretrain": {
            "steps": 12,
            "batch_size": 8,
            "seq_len": 192,
            "exercises": 100,
            "evaluate_every": 6,
            "save_every": 6,
        },
        "sft": {
            "traces": {"bugfix": 60, "recall_short": 40, "recall_long": 16, "recall_uncompacted": 16},
            "exercises": 60,
            "steps": 16,
            "save_every": 8,
        },
        "agent": {"max_turns": 4, "max_turn_tokens": 24, "max_summary_tokens": 16, "max_report_tokens": 32},
        "sampler": {"slots": 16, "decode_rows": (), "windows": ()},
        "rl": {
            "steps": 2,
            "groups": {"bugfix": 2, "recall": 2, **GIVEN},
            "group_size": 4,
            "save_every": 1,
            "record_every": 1,
        },
        "evaluate": {"tasks": 4, "attempts": 2, "other_attempts": 2, "recorded_tasks": 2},
    }
