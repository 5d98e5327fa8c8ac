"""The whole pipeline on one CPU: a K2-shaped model of about a million parameters that learns to fix bugs.

SFT teaches it, from experts that act as well as they can, to repair functions that a comment or contradictory notes
describe, and to carry items through summaries. The tasks of RL have rules that nothing but the reward says: one
person's notes are always right, and the end of a memory chain always asks for the first item.

    python -m launch.pipeline --config=tiny --workdir=runs/tiny             # on two cores: see README
    python -m launch.pipeline --config=tiny:smoke --workdir=runs/smoke      # every stage in minutes, learns little
    python -m launch.pipeline --config=tiny:sharded --workdir=runs/sharded  # smoke on 8 devices
    python -m launch.pipeline --config=tiny:phases --workdir=runs/phases    # smoke with every phase of pretraining
    python -m launch.traffic simulate --config=tiny:traffic --workdir=runs/traffic  # learns from simulated users

This file states what the demo changes; `--help` lists every field with its meaning. Numbers are ours (not published)
unless the field says otherwise.
"""

import dataclasses
from functools import partial

from ml_collections import ConfigDict

from composer_jax.demo.memory_chain import ShortMemoryChain
from composer_jax.demo.prompts import REQUESTS
from composer_jax.errors import UserError
from composer_jax.schema import sections as cfg

WITH_USERS = {"traffic": "full", "traffic_smoke": "smoke"}
"""Size of a run that learns from simulated users -> the size that it has apart from that."""
SIZES = ("full", "smoke", "sharded", "phases", *WITH_USERS)


def get_config(size: str = "full") -> ConfigDict:
    """size: "full" (the demo), "smoke" (seconds per stage), "sharded" (smoke on 8 CPU devices: expert=2, context=2,
    tensor=2), "phases" (smoke with the published phases of continued pretraining), "traffic" (full, for simulated
    users), "traffic_smoke" (smoke, for simulated users)."""
    if size not in SIZES:
        raise UserError(f"configs/tiny.py has no size {size!r}; use {', '.join(SIZES)}.")
    run = run_of_size(WITH_USERS.get(size, size))
    return cfg.config_dict(with_users(run, size == "traffic") if size in WITH_USERS else run)


def run_of_size(size: str) -> cfg.RunConfig:
    full = size == "full"
    mesh = cfg.MeshConfig(cpu_devices=8, replica=1, expert=2, context=2, tensor=2)
    if size != "sharded":
        # Two independent replicas on two cores, gradients added by the host: no collective, so nothing can stall.
        mesh = cfg.MeshConfig(cpu_devices=2, reduction="host")
    with_phases = size == "phases"
    pretrain = pretraining(full, with_phases)
    further = phases(pretrain) if with_phases else {}
    return cfg.RunConfig(
        model=network(size),
        stages=("pretrain", *further, "sft", "rl"),
        mesh=mesh,
        data=data(full),
        tasks=cfg.TasksConfig(families=FAMILIES),
        pretrain=pretrain,
        phases=further,
        sft=fine_tuning(full, with_phases),
        agent=agent(full),
        sampler=cfg.SamplerConfig(slots=64 if full else 16, prefill_shapes=((8, 32), (4, 64), (2, 128))),
        rl=reinforcement_learning(full),
        evaluate=evaluation(size),
    )


FAMILIES = {
    "bugfix": "composer_jax.demo.bugfix:Bugfix",
    "one_bug": "composer_jax.demo.notes:OneBug",
    "two_bugs": "composer_jax.demo.notes:TwoBugs",
    "three_bugs": "composer_jax.demo.notes:ThreeBugs",
    "memory_chain": "composer_jax.demo.memory_chain:ShortMemoryChain",
}


def network(size: str) -> cfg.ModelConfig:
    return cfg.ModelConfig(
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
        max_context=1024,
        yarn=cfg.Yarn(4.0, original_context=256) if size == "phases" else None,
        tie_embeddings=True,
        n_mtp_modules=1,
        # K2 has neither embedding taps nor this initialisation, which is a starting point, not an architecture.
        embedding_taps=3,
        init="composer_jax.demo.induction:apply_induction",
        dispatch="ring" if size == "sharded" else "dense",
        compute_dtype="float32",
        scan_unroll=4,
        remat=False,
    )


def data(full: bool) -> cfg.DataConfig:
    texts = {"tasks": cfg.TokenizerTextConfig("composer_jax.demo.texts:task_texts", count=600 if full else 100)}
    if full:
        return cfg.DataConfig(tokenizer_texts=texts)
    return cfg.DataConfig(max_bytes=400_000, max_heldout_bytes=20_000, tokenizer_bytes=400_000, tokenizer_texts=texts)


def pretraining(full: bool, with_phases: bool) -> cfg.PretrainConfig:
    exercises = {"count": 6000 if full else 100}
    return cfg.PretrainConfig(
        sources={
            "documents": cfg.SourceConfig(weight=0.4),
            "copying": cfg.SourceConfig("composer_jax.demo.copying:copy_curriculum", weight=0.2),
            "exercises": cfg.SourceConfig("composer_jax.demo.exercises:pretraining_exercises", 0.4, exercises),
        },
        steps=400 if full else 12,
        batch_size=16 if full else 8,
        seq_len=256 if full else 192,
        evaluate_every=100 if full else 6,
        save_every=100 if full else 6,
        model={"yarn": None, "max_context": 256} if with_phases else {},
        loss=cfg.LanguageLossConfig(mtp_weight=0.0 if with_phases else 0.1),
        optimizer=cfg.OptimizerConfig(peak=3e-3, warmup=20, final=0.3),
    )


def phases(pretrain: cfg.PretrainConfig) -> dict[str, cfg.PhaseConfig]:
    """Continued pretraining as Composer 2 published it (arXiv 2603.24477, section 3), in miniature.

    Most steps have short rows. The MTP module is then trained alone, on the main head of the network that came out. The
    context grows by YaRN in a short phase on long rows, on a mesh that shares them, and there and in SFT the module
    trains with the rest. The factor of four is ours; the published contexts are 32 and 256 thousand tokens.
    """
    phase = partial(cfg.PhaseConfig, sources=pretrain.sources, save_every=pretrain.save_every)
    mtp = phase(
        steps=6,
        batch_size=pretrain.batch_size,
        seq_len=pretrain.seq_len,
        evaluate_every=pretrain.evaluate_every,
        router_bias_update_rate=0.0,
        model=pretrain.model,
        loss=cfg.LanguageLossConfig(mtp_weight=1.0, trained="mtp"),
        optimizer=pretrain.optimizer,
    )
    long_context = phase(
        steps=4,
        batch_size=2,
        seq_len=1024,
        evaluate_every=2,
        mesh=cfg.MeshConfig(replica=1, context=2),
        loss=cfg.LanguageLossConfig(mtp_weight=0.1),
        optimizer=cfg.OptimizerConfig(warmup=1, final=0.3),
    )
    return {"mtp": mtp, "long_context": long_context}


TRACES = dict(bugfix=1700, one_bug=900, two_bugs=200, chain=600, chain_long=150, chain_whole=100, chain_start=250)
FEW_TRACES = dict(bugfix=50, one_bug=10, two_bugs=4, chain=40, chain_long=16, chain_whole=16, chain_start=16)


def fine_tuning(full: bool, with_phases: bool) -> cfg.SFTConfig:
    traces = {"traces": TRACES if full else FEW_TRACES, "chain_steps": ShortMemoryChain.STEPS}
    exercises, notes = ({"count": count if full else 60} for count in (6000, 3000))
    return cfg.SFTConfig(
        sources={
            "conversations": cfg.TraceSourceConfig("composer_jax.demo.expert_traces:ExpertTraces", traces),
            "exercises": cfg.TraceSourceConfig("composer_jax.demo.exercises:RepairExercises", exercises),
            "notes": cfg.TraceSourceConfig("composer_jax.demo.exercises:NoteExercises", notes),
        },
        steps=900 if full else 16,
        seq_len=512,
        save_every=200 if full else 8,
        loss=cfg.LanguageLossConfig(mtp_weight=0.1 if with_phases else 0.0),
        optimizer=cfg.OptimizerConfig(peak=2.5e-3, warmup=20, final=0.05),
    )


TRIGGER = 78
"""Tokens of context after which a chain is summarized: the first branch exceeds them with its third file, the next one,
which begins with a summary, with its second, and the last one ends before. Whatever the names, a summary never comes
after the question."""


def agent(full: bool) -> cfg.AgentConfig:
    short, long = REQUESTS["short"], REQUESTS["long"]
    # Room for one item of a chain and the next file, not for two items; the small tokenizer spells names out.
    short_tokens = 17 if full else 48
    return cfg.AgentConfig(
        limits=cfg.EpisodeLimits(
            max_turns=12 if full else 4, max_turn_tokens=64 if full else 24, max_episode_tokens=1600
        ),
        compactions={
            "none": cfg.Compaction(),
            "short": cfg.Compaction(TRIGGER, short, max_segments=4, max_summary_tokens=short_tokens),
            "long": cfg.Compaction(TRIGGER, long, max_segments=8, max_summary_tokens=96),
            "late": cfg.Compaction(400, short, max_summary_tokens=64),
        },
        concurrency=64,
    )


def reinforcement_learning(full: bool) -> cfg.RLConfig:
    groups = {"bugfix": 2, "one_bug": 4, "memory_chain": 2} if full else {"bugfix": 1, "one_bug": 2, "memory_chain": 1}
    bugs = dict.fromkeys(("bugfix", "one_bug", "two_bugs", "three_bugs"), "none")
    return cfg.RLConfig(
        steps=45 if full else 2,
        groups=cfg.DISK_FAMILIES | groups,
        # More groups of what is neither solved nor hopeless, and more bugs in a task as the grade grows.
        curriculum=cfg.CurriculumConfig(
            window=4 if full else 0,  # 0: every family in every step
            ladders={"one_bug": ("two_bugs", "three_bugs")},
            promote_above=0.6,
            fall_below=0.1,
            rung_window=4,
        ),
        group_size=8 if full else 4,
        compaction="short",
        family_compactions=bugs | dict.fromkeys(cfg.DISK_FAMILIES, "late"),
        uncompacted_fraction=0.15,
        tokens_per_episode=64.0,
        batches=((256, 16), (512, 2)),
        reward=cfg.RewardConfig(weight=0.1, summary_token=0.1),
        optimizer=cfg.OptimizerConfig(peak=3e-4, warmup=5, decay="linear", final=0.2, b2=0.98, weight_decay=0.0),
        save_every=20 if full else 1,
        record_every=20 if full else 1,
    )


def evaluation(size: str) -> cfg.EvaluateConfig:
    full = size == "full"
    # One task each in sharded: eight devices on two cores decode an episode per second.
    suite = partial(cfg.SuiteConfig, tasks={"full": 32, "sharded": 1}.get(size, 2), attempts=4 if full else 2)
    return cfg.EvaluateConfig(
        suites={
            "bugfix": suite("bugfix"),  # what SFT taught
            "unseen": suite("bugfix", split="unseen", results={"pass_at_1": "rl.unseen_family_{which}"}),
            "one_bug": suite("one_bug"),
            "two_bugs": suite(
                "two_bugs",
                attempts=8 if full else 2,
                results={"pass_at_1": "rl.pass_at_1_{which}", "pass_at_k": "rl.pass_at_{k}_{which}"},
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
        },
        which=("before", "greedy", "after"),
        every={"bugfix": 2} if size == "smoke" else {},
        during=("rl",) if size == "smoke" else ("sft", "rl"),
        headline=("two_bugs", "chain"),
        heldout_attempts=4 if full else 2,
        heldout_compaction="late",
        recorded_tasks=6 if full else 2,
    )


LONGEST_TALK = 640
"""Tokens of a conversation with a user, of up to three requests; a longer one ends there."""


def with_users(run: cfg.RunConfig, full: bool) -> cfg.RunConfig:
    """Returns a run whose policy simulated users work with; what users keep of its edits takes the place of RL.

    Users have the tasks with one bug, and trust other people's notes than the evaluation of the demo. The groups that
    an update plays beside their sessions have no notes, so only users know whose notes are right.
    """
    traces = {"count": 900 if full else 24, "asks": 0.15, "malformed": 0.1, "advised": 0.5}
    users = cfg.TraceSourceConfig("composer_jax.demo.traffic_traces:TrafficTraces", traces)
    groups = {"bugfix": 1, "memory_chain": 1}
    rl = dataclasses.replace(
        run.rl,
        groups=cfg.DISK_FAMILIES | groups,
        curriculum=cfg.CurriculumConfig(),
        batches=((256, 16), (LONGEST_TALK, 4)),
        replay=cfg.ReplayConfig(0.5, 0.3) if full else cfg.ReplayConfig(),
        optimizer=cfg.OptimizerConfig(peak=3e-4, warmup=0, decay="constant", b2=0.98, weight_decay=0.0),
    )
    suite = partial(cfg.SuiteConfig, tasks=96 if full else 4, attempts=4 if full else 1)
    suites = {"bugfix": suite("bugfix"), "chain": suite("memory_chain", compaction="short")}
    return dataclasses.replace(
        run,
        sft=dataclasses.replace(run.sft, sources={**run.sft.sources, "users": users}, seq_len=LONGEST_TALK),
        # What a session has cached stays until its next request, so that no bit of an answer depends on the others.
        sampler=dataclasses.replace(
            run.sampler, max_model_len=LONGEST_TALK, cache_tokens=2 * run.sampler.slots * LONGEST_TALK
        ),
        rl=rl,
        evaluate=dataclasses.replace(
            run.evaluate, suites=suites, which=("before",), every={}, headline=("bugfix", "chain")
        ),
        traffic=learning_from_users(full),
    )


def learning_from_users(full: bool) -> cfg.TrafficConfig:
    # The users of smoke are too few for caps.
    few = cfg.BatchRules(min_sessions=6, cap_user=1.0, cap_repository=1.0, cap_organisation=1.0)
    return cfg.TrafficConfig(
        # A cycle has 256 sessions in 72 repositories: the default caps would leave none of them room.
        batch=cfg.BatchRules(min_sessions=200, cap_user=0.03, cap_repository=0.06) if full else few,
        minibatch_sessions=16 if full else 4,
        kl_limit=0.05 if full else 10.0,
        # So few tasks show no smaller differences; a policy that learns from users works in other ways, too.
        gate=cfg.GateRules(margin=0.15 if full else 0.9, monitors=()),
        # The users of a demo are too few for a test; a step shows what a canary does.
        canary=cfg.CanaryRules(min_users=0),
        users="composer_jax.demo.users:SimulatedUsers",
        users_options={"population": "first"},
    )
