"""The whole pipeline on one CPU: a K2-shaped model of about a million parameters that learns to fix bugs.

SFT teaches it, from experts that act as well as they can, to repair functions that a comment or contradictory notes
describe, and to carry items through summaries. The tasks of RL have rules that nothing but the reward says: one
person's notes are always right, and the end of a memory chain always asks for the first item.

    python -m launch.pipeline --config=tiny --workdir=runs/tiny             # on two cores: see README
    python -m launch.pipeline --config=tiny:smoke --workdir=runs/smoke      # every stage in minutes, learns little
    python -m launch.pipeline --config=tiny:sharded --workdir=runs/sharded  # smoke on 8 devices
    python -m launch.pipeline --config=tiny:phases --workdir=runs/phases    # smoke with every phase of pretraining

This file states what the demo changes; `--help` lists every field with its meaning. Numbers are ours (not published)
unless the field says otherwise.
"""

from typing import Any

from ml_collections import ConfigDict

from composer_jax.demo.memory_chain import ShortMemoryChain
from composer_jax.demo.prompts import REQUESTS
from composer_jax.errors import UserError
from composer_jax.schema.run_config import default_config

SIZES = ("full", "smoke", "sharded", "phases")
FROM_DISK = ("repository", "harbor", "swe_bench", "swe_smith")


def get_config(size: str = "full") -> ConfigDict:
    """size: "full" (the demo), "smoke" (seconds per stage), "sharded" (smoke on 8 CPU devices: expert=2, context=2,
    tensor=2), "phases" (smoke with the published phases of continued pretraining)."""
    if size not in SIZES:
        raise UserError(f"configs/tiny.py has no size {size!r}; use {', '.join(SIZES)}.")
    config: Any = default_config(MODEL)  # Any: a ConfigDict types its sections as plain values
    # Two independent replicas on two cores, gradients added by the host: no collective, so nothing can stall.
    config.mesh.update({"cpu_devices": 2, "reduction": "host"})
    config.data.tokenizer_texts = {"tasks": {"kind": "composer_jax.demo.texts:task_texts", "count": 600}}
    config.tasks.families = {
        "bugfix": "composer_jax.demo.bugfix:Bugfix",
        "one_bug": "composer_jax.demo.notes:OneBug",
        "two_bugs": "composer_jax.demo.notes:TwoBugs",
        "three_bugs": "composer_jax.demo.notes:ThreeBugs",
        "memory_chain": "composer_jax.demo.memory_chain:ShortMemoryChain",
    }
    set_pretrain(config.pretrain)
    set_sft(config.sft)
    set_agent(config)
    set_rl(config.rl)
    set_evaluate(config.evaluate)
    if size != "full":
        shrink(config)
    if size == "sharded":
        config.mesh.update({"cpu_devices": 8, "replica": 1, "expert": 2, "context": 2, "tensor": 2})
        config.mesh.reduction = "collective"
        config.model.dispatch = "ring"
        for suite in config.evaluate.suites.values():
            suite.tasks = 1  # eight devices on two cores decode an episode per second
    if size == "phases":
        set_phases(config)
    if size == "smoke":
        config.evaluate.update({"every": {"bugfix": 2}, "during": ("rl",)})
    return config


MODEL = dict(
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
    # K2 has neither embedding taps nor this initialisation, which is a starting point, not an architecture.
    embedding_taps=3,
    attention_scale=1.0,
    init="composer_jax.demo.induction:apply_induction",
    dispatch="dense",
    compute_dtype="float32",
    scan_unroll=4,
    remat=False,
)


def set_pretrain(pretrain: Any) -> None:
    pretrain.sources = {
        "documents": {"kind": "documents", "weight": 0.4, "options": {}},
        "copying": {"kind": "composer_jax.demo.copying:copy_curriculum", "weight": 0.2, "options": {}},
        "exercises": {
            "kind": "composer_jax.demo.exercises:pretraining_exercises",
            "weight": 0.4,
            "options": {"count": 6000},
        },
    }
    pretrain.update({"steps": 400, "batch_size": 16, "seq_len": 256})
    pretrain.loss.mtp_weight = 0.1
    pretrain.optimizer.update({"peak": 3e-3, "warmup": 20, "final": 0.3})


def set_sft(sft: Any) -> None:
    sft.sources = {
        "conversations": {
            "kind": "composer_jax.demo.expert_traces:ExpertTraces",
            "options": {
                "traces": {
                    "bugfix": 1700,
                    "one_bug": 900,
                    "two_bugs": 200,
                    "chain": 600,
                    "chain_long": 150,
                    "chain_whole": 100,
                    "chain_start": 250,
                },
                "chain_steps": ShortMemoryChain.STEPS,
            },
        },
        "exercises": {"kind": "composer_jax.demo.exercises:RepairExercises", "options": {"count": 6000}},
        "notes": {"kind": "composer_jax.demo.exercises:NoteExercises", "options": {"count": 3000}},
    }
    sft.update({"steps": 900, "batch_size": 8, "seq_len": 512, "save_every": 200})
    sft.optimizer.update({"peak": 2.5e-3, "warmup": 20, "final": 0.05})


TRIGGER = 78
"""Tokens of context after which a chain is summarized: the first branch exceeds them with its third file, the next one,
which begins with a summary, with its second, and the last one ends before. Whatever the names, a summary never comes
after the question."""


def set_agent(config: Any) -> None:
    def compaction(trigger, style, max_summary_tokens, max_segments):
        return {
            **config.agent.compactions.none,  # the other fields, so that flags can set them
            "trigger": trigger,
            "request": REQUESTS[style],
            "max_segments": max_segments,
            "max_summary_tokens": max_summary_tokens,
        }

    config.agent.limits.update({"max_turns": 12, "max_turn_tokens": 64, "max_episode_tokens": 1600})
    config.agent.concurrency = 64
    config.agent.compactions = {
        "none": config.agent.compactions.none,
        # Room for one item of a chain and the next file, not for two items.
        "short": compaction(TRIGGER, "short", 17, 4),
        "long": compaction(TRIGGER, "long", 96, 8),
        "late": compaction(400, "short", 64, 5),
    }
    config.sampler.update(
        {
            "slots": 64,
            "max_model_len": 512,
            "decode_steps": 8,
            "prefill_shapes": ((8, 32), (4, 64), (2, 128)),
        }
    )


BUGS = ("bugfix", "one_bug", "two_bugs", "three_bugs")


def set_rl(rl: Any) -> None:
    rl.steps = 45
    rl.groups.update({"bugfix": 2, "one_bug": 4, "memory_chain": 2})
    # More groups of what is neither solved nor hopeless, and more bugs as soon as it solves those of now.
    rl.curriculum.update({"window": 4, "promote_above": 0.6, "fall_below": 0.1, "rung_window": 4})
    rl.curriculum.ladders = {"one_bug": ("two_bugs", "three_bugs")}
    rl.update({"compaction": "short", "uncompacted_fraction": 0.15, "tokens_per_episode": 64.0})
    rl.family_compactions = {**dict.fromkeys(BUGS, "none"), **dict.fromkeys(FROM_DISK, "late")}
    rl.batches = ((256, 16), (512, 2))
    rl.reward.update({"weight": 0.1, "summary_token": 0.1})
    rl.optimizer.update({"peak": 3e-4, "warmup": 5, "decay": "linear", "final": 0.2, "b2": 0.98, "weight_decay": 0.0})


def set_evaluate(evaluate: Any) -> None:
    def suite(family, attempts=4, split="heldout", compaction="none", compare_to="", results=()):
        return {
            "family": family,
            "split": split,
            "tasks": 32,
            "attempts": attempts,
            "compaction": compaction,
            "compare_to": compare_to,
            "results": dict(results),
        }

    evaluate.suites = {
        "bugfix": suite("bugfix"),  # what SFT taught
        "unseen": suite("bugfix", split="unseen", results={"pass_at_1": "rl.unseen_family_{which}"}),
        "one_bug": suite("one_bug"),
        "two_bugs": suite(
            "two_bugs", 8, results={"pass_at_1": "rl.pass_at_1_{which}", "pass_at_k": "rl.pass_at_{k}_{which}"}
        ),
        "three_bugs": suite("three_bugs"),
        "chain_whole": suite("memory_chain", results={"pass_at_1": "summary.pass_uncompacted_{which}"}),
        "chain": suite(
            "memory_chain",
            compaction="short",
            compare_to="chain_whole",
            results={
                "pass_at_1": "summary.pass_{which}",
                "tokens_per_summary": "summary.tokens_{which}",
                "compaction_error": "summary.compaction_error_{which}",
            },
        ),
        # What a model writes that was asked for a report with all items: the baseline.
        "chain_long": suite(
            "memory_chain",
            compaction="long",
            compare_to="chain_whole",
            results={
                "pass_at_1": "summary.prompted_baseline.pass",
                "tokens_per_summary": "summary.prompted_baseline.tokens",
                "compaction_error": "summary.prompted_baseline.compaction_error",
            },
        ),
    }
    evaluate.which = ("before", "greedy", "after")
    evaluate.headline = ("two_bugs", "chain")
    evaluate.heldout_compaction = "late"
    evaluate.recorded_tasks = 6


def shrink(config: Any) -> None:
    """Every stage in its smallest form: the same code, too short to learn much."""
    config.data.update({"max_bytes": 400_000, "max_heldout_bytes": 20_000, "tokenizer_bytes": 400_000})
    config.data.tokenizer_texts.tasks.count = 100
    config.pretrain.update({"steps": 12, "batch_size": 8, "seq_len": 192, "evaluate_every": 6, "save_every": 6})
    config.pretrain.sources.exercises.options.count = 100
    config.sft.update({"steps": 16, "save_every": 8})
    config.sft.sources.conversations.options.traces = {
        "bugfix": 50,
        "one_bug": 10,
        "two_bugs": 4,
        "chain": 40,
        "chain_long": 16,
        "chain_whole": 16,
        "chain_start": 16,
    }
    config.sft.sources.exercises.options.count = 60
    config.sft.sources.notes.options.count = 60
    config.agent.limits.update({"max_turns": 4, "max_turn_tokens": 24})
    config.agent.compactions.short.max_summary_tokens = 48  # the small tokenizer spells names out
    config.sampler.update({"slots": 16})
    config.rl.update({"steps": 2, "group_size": 4, "save_every": 1, "record_every": 1})
    config.rl.groups.update({"bugfix": 1, "one_bug": 2, "memory_chain": 1})
    config.rl.curriculum.window = 0  # every family in every step
    for suite in config.evaluate.suites.values():
        suite.update({"tasks": 2, "attempts": 2})
    config.evaluate.update({"heldout_attempts": 2, "recorded_tasks": 2})


def set_phases(config: Any) -> None:
    """Continued pretraining as Composer 2 published it (arXiv 2603.24477, section 3), in miniature.

    Most steps have short rows. The MTP module is then trained alone, on the main head of the network that came out. The
    context grows by YaRN in a short phase on long rows, on a mesh that shares them, and there and in SFT the module
    trains with the rest. The factor of four is ours; the published contexts are 32 and 256 thousand tokens.
    """
    config.model.yarn = {"factor": 4.0, "original_context": 256}
    config.pretrain.model = {"yarn": None, "max_context": 256}
    config.pretrain.loss.mtp_weight = 0.0
    mtp, long_context = (config.pretrain.copy_and_resolve_references() for _ in range(2))
    mtp.update({"steps": 6, "router_bias_update_rate": 0.0})
    mtp.loss.update({"mtp_weight": 1.0, "trained": "mtp"})
    long_context.update({"steps": 4, "batch_size": 2, "seq_len": 1024, "evaluate_every": 2})
    long_context.model = {}
    long_context.mesh = {"replica": 1, "context": 2}
    long_context.loss.mtp_weight = 0.1
    long_context.optimizer.update({"peak": 1e-3, "warmup": 1})
    config.sft.loss.mtp_weight = 0.1
    config.phases = {"mtp": mtp, "long_context": long_context}
    config.stages = ("pretrain", "mtp", "long_context", "sft", "rl")
