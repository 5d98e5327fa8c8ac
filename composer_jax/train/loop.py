"""The loop of continued pretraining and SFT: batches in, checkpoints and metrics out, resumable at any point."""

import dataclasses
import sys
import time
import zlib
from collections.abc import Callable, Iterable

import numpy as np

from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.data.packing import PackedBatch
from composer_jax.data.pipeline import BatchStream
from composer_jax.errors import UserError
from composer_jax.observe.metrics import MetricsWriter
from composer_jax.observe.progress import Progress
from composer_jax.parallel.processes import broadcast_from_process0, process_count, process_index
from composer_jax.train.interrupt import AllProcessesInterrupted, defer_signals
from composer_jax.train.learner import Learner, TrainState

STATE = ("params", "router_bias", "optimizer", "step")


def state_items(state: TrainState) -> dict:
    """A TrainState as named checkpoint items, so that another stage can restore the weights alone."""
    return {name: getattr(state, name) for name in STATE}


def save_state(store: CheckpointStore, state: TrainState, **json) -> None:
    """Writes the state under its own step number, unless that step is there already."""
    step = int(state.step)
    if step not in store.steps():
        store.save(step, arrays=state_items(state), json=json)


def restore_state(store: CheckpointStore, like: TrainState) -> tuple[TrainState, dict] | None:
    """The latest saved state on the shardings of `like`, with its JSON values; None when there is none."""
    if store.latest_step() is None:
        return None
    arrays, json = store.restore(like=state_items(like))
    return TrainState(**arrays), json


def batch_fields(batch: PackedBatch) -> dict[str, np.ndarray]:
    return {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}


def require_same_batch(batch: PackedBatch) -> None:
    """Raises a UserError in a process whose batch is not that of the first one: rows of two batches would be mixed."""
    here = zlib.crc32(b"".join(array.tobytes() for array in batch_fields(batch).values()))
    if broadcast_from_process0(lambda: here) != here:
        raise UserError(
            f"process {process_index()} makes other batches than process 0; all hosts need the same code, libraries "
            "and flags."
        )


@dataclasses.dataclass(frozen=True)
class FitPlan:
    """What a run of `fit` does. `name` is shown in the progress bar."""

    name: str
    steps: int
    save_every: int
    evaluate_every: int
    """Steps between held-out evaluations (the first and the last step are always evaluated); needs `heldout`."""


def fit(
    learner: Learner,
    state: TrainState,
    stream: BatchStream,
    plan: FitPlan,
    *,
    store: CheckpointStore,
    metrics: MetricsWriter,
    heldout: Callable[[], Iterable[PackedBatch]] | None = None,
) -> TrainState:
    """Trains until plan.steps, continuing from the latest checkpoint in `store` if there is one.

    Metrics rows: step, tokens (all positions so far that were not padding), loss (nats per loss token), learning_rate,
    grad_norm, load_imbalance, dropped (choices of experts that found no room), tokens_per_s, and heldout_nll where it
    was measured. An interrupt saves before it leaves.

    Several processes each make every batch, whole, from a stream of their own and place the rows of their devices. That
    needs no exchange of data and lets a run continue with another number of processes; what it costs is that each host
    holds all documents and packs all rows. A checkpoint of such a run knows one place in one stream.

    Raises:
      UserError: the checkpoint belongs to other data or another network; the first batch is not that of process 0.
    """
    tokens = 0
    if found := restore_state(store, state):
        state, json = found
        stream.set_state(json["stream"])
        tokens = json["tokens"]
    start = int(state.step)
    # Without a checkpoint the run starts over, and so do its metrics.
    metrics.truncate_after(start if found else -1)
    place, whole = stream.get_state(), True

    def heldout_nll() -> dict[str, float]:
        sums = learner.evaluate(state, map(batch_fields, heldout()))
        return {"heldout_nll": sums["nll"] / sums["tokens"]}

    if start == 0 and heldout:
        with defer_signals():
            metrics.write(0, tokens=0, **heldout_nll())
    try:
        with Progress(plan.steps, "step", plan.name, initial=start) as progress, defer_signals() as raise_deferred:
            for step in range(start + 1, plan.steps + 1):
                began = time.perf_counter()
                batch = next(stream)
                if step == start + 1:
                    require_same_batch(batch)
                whole = False
                state, row = learner.step(state, [batch_fields(batch)], batch.weights.sum())
                place = stream.get_state()
                real = int((batch.segments > 0).sum())
                tokens += real
                row["tokens_per_s"] = real / (time.perf_counter() - began)
                row["tokens"] = tokens
                if heldout and (step % plan.evaluate_every == 0 or step == plan.steps):
                    row |= heldout_nll()
                metrics.write(step, **row)
                whole = True
                if step % plan.save_every == 0:
                    save_state(store, state, stream=place, tokens=tokens)
                progress.update(loss=row["loss"], **{k: row[k] for k in ("heldout_nll",) if k in row})
                raise_deferred()
    finally:
        # After an error inside a step there is nothing to save: the state it started from is used up. And what one of
        # several processes runs into alone, it cannot save alone.
        error = sys.exception()
        together = process_count() == 1 or error is None or isinstance(error, AllProcessesInterrupted)
        if whole and together and int(state.step) > start:
            save_state(store, state, stream=place, tokens=tokens)
    return state
