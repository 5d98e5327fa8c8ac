"""The training loop of continued pretraining and SFT: batches in, checkpoints and metrics out, resumable.

A step whose gradient is not finite is skipped; several in a row end the run (SkippedSteps).

Each of several processes packs every batch, whole, from its own stream, and places the rows of its devices. It reads
the token ids of prepared data for these rows only, but knows the segments and weights of all, so that every count is
that of the whole batch. Nothing is exchanged, and a checkpoint holds one position in one stream, which resumes on any
number of processes. In return each host holds all documents that are not prepared.
"""

import dataclasses
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.data.packing import UNREAD, PackedBatch
from composer_jax.data.pipeline import BatchStream
from composer_jax.errors import UserError
from composer_jax.models.flops import document_lengths
from composer_jax.observe.metrics import MetricsWriter
from composer_jax.observe.progress import Progress
from composer_jax.observe.step_trace import NO_TRACE, StepTrace
from composer_jax.parallel.processes import broadcast_from_process0, process_count, process_index
from composer_jax.train.interrupt import AllProcessesInterrupted, defer_signals
from composer_jax.train.learner import Learner, StepMetrics, TrainState
from composer_jax.train.shard_batch import micro_batches
from composer_jax.train.utilisation import Utilisation

STATE = ("params", "router_bias", "optimizer", "step")
"""Checkpoint items of a TrainState."""
MOST_SKIPPED = 3
"""Skipped steps in a row that end a run: one may be the fault of its batch, several in a row are not."""


def state_items(state: TrainState) -> dict[str, Any]:
    """The fields of a TrainState as named checkpoint items, so that another stage can restore the weights alone."""
    return {name: getattr(state, name) for name in STATE}


def save_state(store: CheckpointStore, state: TrainState, step: int | None = None, **json: Any) -> list[int]:
    """Saves the state and JSON values under `step` (None: the state's own), unless the store has that step.

    Returns the complete steps, of which this one is none unless it was there before.
    """
    step, complete = int(state.step) if step is None else step, store.steps()
    if step not in complete:
        store.save(step, arrays=state_items(state), json=json)
    return complete


def restore_state(store: CheckpointStore, state: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
    """Replaces a state by the latest one, on the same shardings; None if the store is empty.

    state: arrays, which are deleted before others are read because two states may not fit in memory, or
      Learner.abstract_state(). An empty store leaves them as they are.

    Returns:
      (the restored state, the JSON values of its step).
    """
    if store.latest_step() is None:
        return None
    like = jax.tree.map(_abstract, state)
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array):
            leaf.delete()
    arrays, json = store.restore(like=state_items(like))
    return TrainState(**arrays), json


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    committed = getattr(leaf, "committed", True)  # an uncommitted array is restored uncommitted
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding if committed else None)


def batch_fields(batch: PackedBatch) -> dict[str, np.ndarray]:
    """The fields of a batch as the dict that a Learner takes."""
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}


def require_same_batch(batch: PackedBatch, stream: BatchStream) -> None:
    """Raises UserError in a process whose batch differs from that of process 0, because their rows would be mixed.

    The token ids of a row are compared where both have read it; elsewhere the identity of the stream stands for them.
    """
    fields = batch_fields(batch)
    tokens = fields.pop("tokens")
    mine = {
        "stream": stream.get_state()["stream"],
        "fields": [zlib.crc32(array.tobytes()) for array in fields.values()],
        "rows": [None if (row == UNREAD).any() else zlib.crc32(row.tobytes()) for row in tokens],
    }
    first = broadcast_from_process0(lambda: mine)
    same = mine["stream"] == first["stream"] and mine["fields"] == first["fields"]
    if not (same and all(a == b for a, b in zip(mine["rows"], first["rows"], strict=True) if None not in (a, b))):
        raise UserError(
            f"process {process_index()} makes other batches than process 0; all hosts need the same code, libraries "
            "and flags."
        )


@dataclasses.dataclass(frozen=True)
class FitPlan:
    """How long `fit` trains, and how often it saves and evaluates."""

    name: str
    """Shown in the progress bar."""
    steps: int
    """Optimizer steps in total, those before a resume included."""
    save_every: int
    """Steps between checkpoints."""
    evaluate_every: int
    """Steps between held-out evaluations; the first and the last step are always evaluated. Unused without held-out
    data."""
    accumulate: int = 1
    """Micro-batches that the rows of a batch are split into; their gradients are added."""
    utilisation: Utilisation | None = None
    """Gives the rows their mfu; None where the peak of the devices is not known."""


class StepEvaluation(Protocol):
    """What is measured of the weights after some steps beside the loss of held-out data, such as suites of episodes."""

    def truncate_after(self, step: int) -> None:
        """Drops the results of later steps, which are taken again."""
        ...

    def is_due(self, step: int) -> bool:
        """Returns whether `run` measures anything after a step; equal in all processes."""
        ...

    def run(self, step: int, state: TrainState) -> None:
        """Measures the weights of a state, which it leaves as it is, unless the results of this step are there."""
        ...


def fit(
    learner: Learner,
    state: TrainState,
    stream: BatchStream,
    plan: FitPlan,
    *,
    store: CheckpointStore,
    metrics: MetricsWriter,
    heldout: Callable[[], Iterable[PackedBatch]] | None = None,
    heldout_sources: Mapping[str, Callable[[], Iterable[PackedBatch]]] | None = None,
    evaluation: StepEvaluation | None = None,
    trace: StepTrace = NO_TRACE,
) -> TrainState:
    """Trains until plan.steps, from the latest checkpoint in `store` or, without one, from `state`, which it donates.

    Metrics rows: step, tokens (all positions so far that were not padding), loss (nats per loss token), learning_rate,
    grad_norm, tokens_per_s, mfu where the plan has a utilisation, heldout_nll where it was measured, and with experts
    load_imbalance, router_entropy (nats) and dropped (expert choices beyond the capacity of dispatch), the last two
    also of the held-out data; under QK-clip max_attention_logit.

    Args:
      heldout: one pass over the held-out data.
      heldout_sources: name -> one pass over further held-out data, measured at the same steps as `heldout`, in columns
        heldout_NAME_nll and so on.
      evaluation: runs after every step that it is due at, and when the run goes on from the checkpoint of such a step.
      trace: traces its steps.

    An interrupt saves a checkpoint after the current step and its evaluation, a second one ends the run at once. A row
    is written when the next step has started (several processes: at once; gradients added by the host: when the next
    batch is there), but before the checkpoint of its step.

    Raises:
      UserError: the checkpoint belongs to other data or another network; the first batch differs from process 0's; the
        gradients of several steps in a row are not finite (SkippedSteps).
    """
    sources = {f"heldout_{name}": batches for name, batches in (heldout_sources or {}).items()}
    heldouts = ({"heldout": heldout} if heldout else {}) | sources
    run = _FitRun(learner, state, stream, plan, store, metrics, heldouts, evaluation, trace)
    start = run.resume()
    if start == 0 and heldouts:
        with defer_signals():
            metrics.write(0, tokens=0, **run.evaluate())
    try:
        with Progress(plan.steps, "step", plan.name, initial=start) as progress, trace, defer_signals() as raise_signal:
            run.measure(start)
            for step in range(start + 1, plan.steps + 1):
                run.train_step(step, first=step == start + 1)
                progress.update(1, **run.shown())
                run.skipped.require_progress()
                raise_signal()
                if run.measure(step):
                    raise_signal()
    finally:
        # A process cannot save alone after an error that the other processes do not have.
        error = sys.exception()
        run.write_pending()
        together = process_count() == 1 or error is None or isinstance(error, AllProcessesInterrupted)
        if run.consistent and together and int(run.state.step) > start:
            run.save()
    return run.state


class SkippedSteps:
    """Counts the steps that a Learner skipped because their gradient was not finite; several in a row end the run."""

    def __init__(self) -> None:
        self.total = 0
        self._in_a_row: list[int] = []

    def add(self, step: int, skipped: float) -> None:
        """Counts a step. skipped: the metric of Learner.step, 1 or 0."""
        self.total += bool(skipped)
        self._in_a_row = [*self._in_a_row, step] if skipped else []

    def require_progress(self) -> None:
        """Raises a UserError if the last MOST_SKIPPED steps were skipped, or more."""
        if len(self._in_a_row) >= MOST_SKIPPED:
            steps = self._in_a_row
            raise UserError(
                f"nothing was learned in steps {steps[0]} to {steps[-1]}, because their gradients are not finite. Look "
                "at the data, or start a new workdir with a lower optimizer.peak; the same command goes on with the "
                "next batches."
            )


class PendingRow(NamedTuple):
    """The metrics row of a step that has been started."""

    step: int
    started: float
    """time.perf_counter() at its start."""
    lengths: np.ndarray
    """Tokens of each document of its batch: integers [documents]."""
    tokens_so_far: int
    metrics: StepMetrics


@dataclasses.dataclass
class _FitRun:
    """The state of one call of `fit`."""

    learner: Learner
    state: TrainState
    stream: BatchStream
    plan: FitPlan
    store: CheckpointStore
    metrics: MetricsWriter
    heldouts: Mapping[str, Callable[[], Iterable[PackedBatch]]]
    """Held-out data by the beginning of its columns."""
    evaluation: StepEvaluation | None
    trace: StepTrace
    tokens: int = 0
    position: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Position in the stream after the last batch that was trained."""
    consistent: bool = True
    """False inside a step, which donates the state it starts from: nothing can be saved there."""
    pending: PendingRow | None = None
    fetched: float = 0.0
    """time.perf_counter() when the last row was fetched."""
    last_row: dict[str, float] = dataclasses.field(default_factory=dict)
    """The last row that was written."""
    skipped: SkippedSteps = dataclasses.field(default_factory=SkippedSteps)

    def resume(self) -> int:
        """Restores the latest checkpoint, if there is one, and cuts the metrics to it; returns the step."""
        restored = restore_state(self.store, self.state)
        if restored:
            self.state, json = restored
            self.stream.set_state(json["stream"])
            self.tokens = json["tokens"]
        self.position = self.stream.get_state()
        start = int(self.state.step)
        # Without a checkpoint the run starts over, and the metrics with it.
        self.metrics.truncate_after(start if restored else -1)
        if self.evaluation is not None:
            self.evaluation.truncate_after(start if restored else -1)
        return start

    def train_step(self, step: int, *, first: bool) -> None:
        """Trains one batch, evaluates and saves where the plan says so; the row may be written by the next call."""
        self.trace.begin(step)
        started = time.perf_counter()
        batch = next(self.stream)
        if first:
            require_same_batch(batch, self.stream)
        if self.learner.host_reduction:
            self.write_pending()  # starting a step waits for its gradients there, which are not this row's time
        self.consistent = False
        self.state, metrics = self.learner.start_step(
            self.state,
            micro_batches(batch_fields(batch), self.plan.accumulate),
            batch.weights.sum(),
            steps_taken=step - 1,
        )
        self.position = self.stream.get_state()
        self.write_pending()
        lengths = document_lengths(batch.segments)
        self.tokens += int(lengths.sum())
        self.pending = PendingRow(step, started, lengths, self.tokens, metrics)
        last = step == self.plan.steps
        evaluates = bool(self.heldouts) and (last or step % self.plan.evaluate_every == 0)
        # Several processes agree on interrupts by a collective after every step, which waits for the devices anyway.
        if evaluates or last or process_count() > 1:
            self.write_pending(evaluate=evaluates)
        self.consistent = True
        if self.trace.ends(step):
            self.write_pending()  # waits for the step
            self.trace.end()
        if step % self.plan.save_every == 0:
            self.save()

    def write_pending(self, *, evaluate: bool = False) -> None:
        """Fetches and writes the pending row, if there is one, with the held-out loss of the state on request."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        row = pending.metrics.fetch()
        now = time.perf_counter()
        seconds = now - max(pending.started, self.fetched)
        row["tokens_per_s"] = float(pending.lengths.sum()) / seconds
        if self.plan.utilisation is not None:
            row["mfu"] = self.plan.utilisation.mfu(pending.lengths, seconds)
        row["tokens"] = pending.tokens_so_far
        self.fetched = now
        if evaluate:
            row |= self.evaluate()
        self.metrics.write(pending.step, **row)
        self.skipped.add(pending.step, row["skipped"])
        self.last_row = row

    def shown(self) -> dict[str, Any]:
        """What the progress shows: the last row, in few columns, and where the trace is once it is written."""
        row = self.last_row
        shown: dict[str, Any] = {name: row[name] for name in ("loss", "heldout_nll") if name in row}
        if "tokens_per_s" in row:
            shown["tokens/s"] = round(row["tokens_per_s"])
        if "mfu" in row:
            shown["MFU"] = f"{row['mfu']:.1%}"
        if self.skipped.total:
            shown["skipped"] = self.skipped.total
        if self.trace.is_written:
            shown["trace"] = str(self.trace.folder)
        return shown

    def evaluate(self) -> dict[str, float]:
        """{"heldout_nll": nats per loss token of the held-out data}, and with experts heldout_router_entropy and
        heldout_dropped; the same of the other held-out data."""
        row = {}
        for name, batches in self.heldouts.items():
            sums = self.learner.evaluate(self.state, map(batch_fields, batches()))
            row[f"{name}_nll"] = sums["nll"] / sums["tokens"]
            if "routed" in sums:
                row[f"{name}_router_entropy"] = sums["router_entropy"] / max(1.0, sums["routed"])
                row[f"{name}_dropped"] = sums["dropped"]
        return row

    def measure(self, step: int) -> bool:
        """Runs the evaluation if it is due after this step, the last one that was taken; returns whether it is."""
        if self.evaluation is None or not self.evaluation.is_due(step):
            return False
        self.write_pending()
        self.evaluation.run(step, self.state)
        return True

    def save(self) -> None:
        """Writes the pending row and saves the state, the position in the stream and the token count."""
        self.write_pending()
        save_state(self.store, self.state, stream=self.position, tokens=self.tokens)
