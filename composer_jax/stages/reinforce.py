"""Reinforcement learning against sandboxed repositories, with self-summarization in the loop."""

from collections import Counter

from composer_jax.agent.episode_record import build_episode_record
from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.checkpoint.weight_chain import WeightPublisher
from composer_jax.checkpoint.weight_shards import published_shards
from composer_jax.event_loop import EventLoop
from composer_jax.observe.episodes import EpisodeRecord, read_episodes, write_episodes
from composer_jax.observe.metrics import MetricsWriter, read_metrics
from composer_jax.observe.progress import Progress
from composer_jax.parallel.processes import require_one_process
from composer_jax.rl.orchestrator import Cursor, Orchestrator
from composer_jax.rl.rollout import Rollout
from composer_jax.stages.run import Run
from composer_jax.train.interrupt import defer_signals
from composer_jax.train.learner import TrainState
from composer_jax.train.loop import restore_state, save_state

TOTALS = ("rollout_s", "sandbox_s", "train_s", "step_s", "sampled_tokens", "sandbox_runs", "sandbox_hits")
"""Columns of metrics/rl.jsonl whose sums are results of the stage."""


def reinforce(run: Run) -> None:
    """Leaves checkpoints/rl, metrics/rl.jsonl and episodes/rl.jsonl."""
    require_one_process("RL")
    if run.workdir.stage_done("rl"):
        return
    params, router_bias = run.model.weights_before("rl")
    config = run.config.rl
    with run.stage("rl") as result, run.services.rollout_context() as (context, loop):
        learner = run.model.learner(config.optimizer, config.steps, config.loss)
        orchestrator = Orchestrator(
            config,
            run.config.agent,
            run.config.seed,
            run.services.tasks,
            learner,
            run.services.sampler_with(params, router_bias, version=0),
            context,
        )
        state = learner.init_state(params, router_bias)
        metrics_path = run.path / "metrics" / "rl.jsonl"
        metrics = MetricsWriter(metrics_path, run.workdir.require_held)
        with run.model.store("rl") as store, metrics:
            _take_steps(run, orchestrator, state, loop, store, metrics)
        rows = read_metrics(metrics_path)
        result |= {
            "steps": config.steps,
            "episodes": config.steps * _episodes_per_step(run),
            **{name: sum(row[name] for row in rows) for name in TOTALS},
            "compilations_after_first_tenth": sum(r["compilations"] for r in rows[max(1, len(rows) // 10) :]),
        }


def _take_steps(
    run: Run,
    orchestrator: Orchestrator,
    state: TrainState,
    loop: EventLoop,
    store: CheckpointStore,
    metrics: MetricsWriter,
) -> None:
    """Takes all steps that the latest checkpoint does not have; an interrupt saves before it leaves."""
    config, cursor = run.config.rl, Cursor()
    publisher = WeightPublisher(config.publish) if config.publish else None
    if restored := restore_state(store, state):
        state, saved = restored
        cursor = Cursor(**saved["cursor"])
    start = cursor.task_step
    run.services.check_task_manifest(start)
    metrics.truncate_after(start)
    records_path = run.path / "episodes" / "rl.jsonl"
    records = [record for record in read_episodes(records_path) if record.step is not None and record.step <= start]
    saved_step, is_consistent, per_step = start, True, _episodes_per_step(run)

    def save() -> None:
        write_episodes(records_path, records)  # first: a resumed run drops the records after its checkpoint
        save_state(store, state, cursor.task_step, cursor=cursor.to_json())

    def publish() -> None:
        if publisher is not None:
            publisher.publish(published_shards(state.params, state.router_bias), cursor.weight_version)

    publish()
    try:
        with Progress(config.steps * per_step, "episode", "RL", initial=start * per_step) as progress:
            for step in range(start + 1, config.steps + 1):
                rollout = orchestrator.roll_out(state, cursor, loop)
                with defer_signals():
                    is_consistent = False
                    version = cursor.weight_version
                    state, cursor, row = orchestrator.learn(state, cursor, rollout)
                    metrics.write(step, **row)
                    is_consistent = True
                    if cursor.weight_version != version:
                        publish()
                    if step % config.record_every == 0 or step == 1:
                        records += first_episodes_of_each_family(run, rollout, step)
                    if step % config.save_every == 0 or step == config.steps:
                        save()
                        saved_step = step
                progress.update(per_step, step=step, reward=row["reward"])
    finally:
        # After an error inside a step there is nothing to save: the step has consumed the state it started from.
        if is_consistent and cursor.task_step > saved_step:
            save()


def _episodes_per_step(run: Run) -> int:
    return sum(run.config.rl.groups.values()) * run.config.rl.group_size


def first_episodes_of_each_family(run: Run, rollout: Rollout, step: int) -> list[EpisodeRecord]:
    """Returns records of the first two episodes of each family, for the report."""
    counts: Counter[str] = Counter()
    records = []
    for spec, episode in zip(rollout.specs, rollout.episodes, strict=True):
        counts[episode.family] += 1
        if counts[episode.family] <= 2:
            chosen = run.config.rl.family_compactions.get(episode.family, run.config.rl.compaction)
            condition = "none" if spec.compaction.trigger is None else chosen
            records.append(build_episode_record(episode, spec.task, run.model.chat, condition=condition, step=step))
    return records
