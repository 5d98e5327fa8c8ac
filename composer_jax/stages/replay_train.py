"""RL's learning alone: takes the steps that another run has recorded, and plays no episode."""

import time

from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.errors import UserError
from composer_jax.observe.compilations import count_compilations
from composer_jax.observe.metrics import read_metrics
from composer_jax.observe.progress import Progress
from composer_jax.rl.learning_step import complete_step, learner_arguments
from composer_jax.rl.records import RolloutRecords
from composer_jax.stages.memory_check import memory_check
from composer_jax.stages.run import Run
from composer_jax.stages.train_rl import TOTALS, open_update
from composer_jax.train.interrupt import defer_signals
from composer_jax.train.loop import save_state

NOT_PLAYED = dict.fromkeys(("rollout_s", "sandbox_s", "sandbox_runs", "sandbox_hits"), 0.0)
"""Columns of metrics/rl.jsonl about playing."""


def train_on_records(run: Run, records: RolloutRecords) -> None:
    """Leaves checkpoints/rl and metrics/rl.jsonl, as RL does; an interrupt saves, and another call goes on.

    With the config and the starting weights of the recorded run, the weights of every step are equal bit for bit. With
    another rl.algorithm, loss, reward or optimizer it is the same data under another algorithm. Raises UserError if the
    records have fewer steps than rl.steps, or a group was deleted.
    """
    if run.is_done("rl"):
        return
    steps = run.config.rl.steps
    if steps > len(records.batches):
        raise UserError(
            f"{records.folder} has records of {len(records.batches)} steps and rl.steps={steps}; use "
            f"--config.rl.steps={len(records.batches)} or less."
        )
    for number in (number for record in records.batches[:steps] for number in record.groups):
        if not records.has(number):
            records.load(number)  # its sentence, before the hours and not after them
    with memory_check(run, "rl", samples=False), run.stage("rl") as result, run.model.store("rl") as store:
        rows = _take_steps(run, records, store)
        totals = {name: sum(row.get(name) or 0.0 for row in rows) for name in TOTALS}
        episodes = sum(len(records.load(number).episodes) for b in records.batches[:steps] for number in b.groups)
        late = sum(row["compilations"] for row in rows[max(1, len(rows) // 10) :])
        result |= {"steps": steps, "episodes": episodes, **totals, "compilations_after_first_tenth": late}


def _take_steps(run: Run, records: RolloutRecords, store: CheckpointStore) -> list[dict]:
    """Takes the steps that the latest checkpoint does not have; returns the rows of metrics of all steps."""
    config = run.config.rl
    update, state, cursor = open_update(run, store)
    utilisation = run.model.utilisation("rl")
    trace = run.trace("rl")
    saved = cursor.task_step
    is_consistent = True
    with run.metrics("rl") as metrics:
        metrics.truncate_after(cursor.task_step)
        try:
            with (
                Progress(config.steps, "step", "RL on records", initial=cursor.task_step) as progress,
                trace,
                defer_signals() as raise_deferred,
            ):
                while cursor.task_step < config.steps:
                    trace.begin(cursor.task_step + 1)
                    began, compilations = time.perf_counter(), count_compilations()
                    groups = [records.load(number) for number in records.batches[cursor.task_step].groups]
                    is_consistent = False
                    learning = time.perf_counter()
                    state, update_result = update.step(state, *learner_arguments(config, cursor, groups))
                    train_s = time.perf_counter() - learning
                    completed = complete_step(config, cursor, groups, state, update_result, train_s, utilisation)
                    cursor = completed.cursor
                    is_consistent = True
                    spent = {
                        "train_s": train_s,
                        "step_s": time.perf_counter() - began,
                        "compilations": count_compilations() - compilations,
                    }
                    metrics.write(completed.step, **completed.row, **NOT_PLAYED, **spent)
                    if trace.ends(completed.step):
                        trace.end()
                        progress.update(0, trace=str(trace.folder))
                    progress.update(1, reward=completed.row["reward"], grade=completed.row["grade"])
                    if cursor.task_step % config.save_every == 0:
                        save_state(store, state, cursor.task_step, cursor=cursor.to_json())
                        saved = cursor.task_step
                    raise_deferred()
        finally:
            if is_consistent and cursor.task_step > saved:
                save_state(store, state, cursor.task_step, cursor=cursor.to_json())
    return read_metrics(run.path / "metrics" / "rl.jsonl")
