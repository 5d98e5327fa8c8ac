"""Reinforcement learning against sandboxed repositories, with self-summarization in the loop."""

import collections
import dataclasses

from composer_jax.agent.episode_record import build_episode_record
from composer_jax.demo import recall
from composer_jax.observe.episodes import EpisodeRecord, read_episodes, write_episodes
from composer_jax.observe.metrics import MetricsWriter, read_metrics
from composer_jax.observe.progress import Progress
from composer_jax.parallel.processes import require_one_process
from composer_jax.rl.orchestrator import Orchestrator, OrchestratorConfig
from composer_jax.rl.rewards import RewardConfig
from composer_jax.rl.rollout import Rollout
from composer_jax.stages.run import Run
from composer_jax.train.interrupt import defer_signals
from composer_jax.train.loop import restore_state, save_state
from composer_jax.train.losses import PolicyLossConfig, make_loss

TOTALS = ("rollout_s", "sandbox_s", "train_s", "step_s", "sampled_tokens", "sandbox_runs", "sandbox_hits")
"""Columns of metrics/rl.jsonl whose sums are results of the stage."""


def reinforce(run: Run) -> None:
    """Leaves checkpoints/rl, metrics/rl.jsonl and episodes/rl.jsonl."""
    require_one_process("RL")
    if run.workdir.stage_done("rl"):
        return
    params, router_bias = run.weights_of("sft")
    settings = run.settings.rl
    with run.stage("rl") as result, run.environment() as (environment, loop):
        learner = run.learner(
            run.optimizer(settings.optimizer, settings.steps),
            make_loss(PolicyLossConfig(ratio_low=settings.ratio_low, ratio_high=settings.ratio_high)),
        )
        sampler = run.sampler_with(params, router_bias, version=0)
        orchestrator = Orchestrator(orchestrator_config(run), run.tasks, learner, sampler, environment)
        state = learner.init_state(params, router_bias)
        path = run.path / "metrics" / "rl.jsonl"
        records_path = run.path / "episodes" / "rl.jsonl"
        with run.store("rl") as store, MetricsWriter(path) as metrics:
            if found := restore_state(store, state):
                state = found[0]
            start = int(state.step)
            run.hold_to_tasks(start)
            metrics.truncate_after(start)
            records = [r for r in read_episodes(records_path) if r.step <= start] if records_path.exists() else []
            per_step, whole = sum(settings.groups.values()) * settings.group_size, True
            try:
                with Progress(settings.steps * per_step, "episode", "RL", initial=start * per_step) as progress:
                    for step in range(start + 1, settings.steps + 1):
                        rollout = orchestrator.roll_out(state, loop)
                        with defer_signals():
                            whole = False
                            state, row = orchestrator.learn(state, rollout)
                            metrics.write(step, **row)
                            whole = True
                            if step % settings.record_every == 0 or step == 1:
                                records += first_of_each_family(run, rollout, step)
                            if step % settings.save_every == 0 or step == settings.steps:
                                save_state(store, state)
                                write_episodes(records_path, records)
                        progress.update(per_step, step=step, reward=row["reward"])
            finally:
                # After an error inside a step there is nothing to save: the state it started from is used up.
                if whole and int(state.step) > start:
                    save_state(store, state)
                    write_episodes(records_path, records)
        rows = read_metrics(path)
        total = {name: sum(row[name] for row in rows) for name in TOTALS}
        result |= {
            "steps": settings.steps,
            "episodes": settings.steps * per_step,
            **total,
            "compilations_after_first_tenth": sum(r["compilations"] for r in rows[max(1, len(rows) // 10) :]),
        }


def first_of_each_family(run: Run, rollout: Rollout, step: int) -> list[EpisodeRecord]:
    """The first two episodes of each family, for the report."""
    seen, records = collections.Counter(), []
    for job, episode in zip(rollout.jobs, rollout.episodes, strict=True):
        seen[episode.family] += 1
        if seen[episode.family] <= 2:
            condition = "no_trigger" if job.compaction.trigger is None else "short"
            records.append(build_episode_record(episode, job.task, run.chat, condition=condition, step=step))
    return records


def orchestrator_config(run: Run) -> OrchestratorConfig:
    rl, agent = run.settings.rl, run.settings.agent
    return OrchestratorConfig(
        groups=dict(rl.groups),
        group_size=rl.group_size,
        trigger=tuple(rl.trigger),
        compacted_families=(recall.FAMILY, *run.tasks.train),
        uncompacted_share=rl.uncompacted_share,
        max_segments=agent.max_segments,
        max_summary_tokens=agent.max_summary_tokens,
        tokens_per_episode=rl.tokens_per_episode,
        batches=rl.batches,
        reward=RewardConfig(**dataclasses.asdict(rl.reward)),
        seed=run.settings.seed,
    )
