"""Grain pipelines: endless, shuffled, resumable streams of PackedBatch, and a single pass over held-out data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, cast

import grain
import numpy as np

from composer_jax.data.packing import UNREAD, PackedBatch, pack_documents, packed_batch
from composer_jax.data.token_source import DocumentPieces, Documents, TokenSource, Trace, TraceSource
from composer_jax.errors import UserError

READERS = 4
"""Threads that read rows of a batch from a disk at the same time."""


class BatchStream:
    """An endless iterator of PackedBatch whose position can be saved and restored.

    `get_state` returns a small dictionary for JSON. A stream made with the same arguments continues, after `set_state`,
    with exactly the next batch. `dropped` counts documents that were longer than a row. After a batch with rows of a
    disk, the next one is made in the background; rows in memory would only compete for the interpreter lock.

    Several processes make streams that differ in `read_rows` only. Their batches are equal except for the token ids of
    rows that a process does not read, and so are their positions, so a position resumes on any number of processes.
    """

    def __init__(
        self,
        rows: grain.IterDataset,
        batch_size: int,
        identity: Mapping[str, int | str],
        *,
        read_rows: Collection[int] | None = None,
        dropped: int = 0,
    ) -> None:
        """
        Args:
          rows: see TokenSource.rows.
          read_rows: rows of a batch that are read, where a source leaves the choice; the others have the token ids
            UNREAD. None reads all.
        """
        self._iterator = iter(rows)
        self._place = self._iterator.get_state()
        self._pool = ThreadPoolExecutor(1 + READERS, "read-rows")
        self._ahead: Future[_Made] | None = None
        self._read_rows = frozenset(range(batch_size) if read_rows is None else read_rows)
        self._batch_size, self._identity = batch_size, identity
        self.dropped = dropped

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> PackedBatch:
        made = self._ahead.result() if self._ahead else self._make()
        self._place = made.place
        self._ahead = self._pool.submit(self._make) if made.from_disk else None
        return made.batch

    def _make(self) -> _Made:
        rows = [next(self._iterator) for _ in range(self._batch_size)]
        tokens = [self._start_reading(number, row) for number, row in enumerate(rows)]
        tokens = [ids.result() if isinstance(ids, Future) else ids for ids in tokens]
        segments, weights = (np.stack([row[name] for row in rows]) for name in ("segments", "weights"))
        from_disk = any(callable(row["tokens"]) for row in rows)
        return _Made(packed_batch(np.stack(tokens), segments, weights), self._iterator.get_state(), from_disk)

    def _start_reading(self, number: int, row: Mapping[str, Any]) -> np.ndarray | Future[np.ndarray]:
        if not callable(row["tokens"]):
            return row["tokens"]
        if number not in self._read_rows:
            return np.full(row["segments"].shape, UNREAD, np.int32)
        return self._pool.submit(cast(Callable[[], np.ndarray], row["tokens"]))

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last batch."""
        return {"stream": dict(self._identity), "place": self._place}

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to a saved position. Raises UserError if a stream over other data saved it."""
        other = state["stream"]
        names = sorted(self._identity.keys() | other.keys())
        differences = [
            f"{name} was {other.get(name)} and is {self._identity.get(name)}"
            for name in names
            if other.get(name) != self._identity.get(name)
        ]
        if differences:
            raise UserError(
                f"the saved position belongs to other data ({'; '.join(differences)}); "
                "use the same data and settings, or a new folder"
            )
        if self._ahead:
            wait([self._ahead])
            self._ahead = None
        self._iterator.set_state(_tuples(state["place"]))
        self._place = self._iterator.get_state()


class _Made(NamedTuple):
    """A batch, and the position after it."""

    batch: PackedBatch
    place: dict[str, Any]
    from_disk: bool
    """Whether some rows were left for the stream to read."""


class Mixture(grain.IterDataset):
    """An endless mix of datasets. A source's weight moves linearly from its first to its last value, and stays there.

    The next row comes from the source that is furthest behind its share, so the order is fixed and every source has its
    share of any part of the run, up to a few rows. (Grain's own mix has constant weights.)
    """

    def __init__(self, sources: Sequence[grain.IterDataset], first: Sequence[float], last: Sequence[float], rows: int):
        """
        Args:
          first, last: weights of the sources, at least 0 and with a sum above 0.
          rows: number of rows after which the weights are `last`.
        """
        super().__init__(sources)
        self._first, self._last, self._rows = np.asarray(first, float), np.asarray(last, float), rows

    def __iter__(self) -> grain.DatasetIterator:
        return _MixtureIterator([iter(source) for source in self._parents], self._first, self._last, self._rows)


class _MixtureIterator(grain.DatasetIterator):
    def __init__(self, sources: Sequence[grain.DatasetIterator], first: np.ndarray, last: np.ndarray, rows: int):
        super().__init__(sources)
        self._sources, self._first, self._last, self._rows = sources, first, last, rows
        self._behind = np.zeros(len(sources))  # rows that each source should have had by now, minus those it had
        self._done = 0

    def __next__(self) -> Any:
        weights = self._first + (self._last - self._first) * min(1.0, self._done / self._rows)
        self._behind += weights / weights.sum()
        source = int(np.argmax(self._behind))
        self._behind[source] -= 1
        self._done += 1
        return next(self._sources[source])

    def get_state(self) -> dict[str, Any]:
        return {
            "done": self._done,
            "behind": self._behind.tolist(),
            "sources": [source.get_state() for source in self._sources],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._done, self._behind = state["done"], np.asarray(state["behind"], float)
        for source, saved in zip(self._sources, state["sources"], strict=True):
            source.set_state(saved)


def pretraining_batches(
    sources: Mapping[str, tuple[TokenSource, float]],
    *,
    seq_len: int,
    batch_size: int,
    seed: int,
    final_weights: Mapping[str, float] | None = None,
    steps: int = 0,
    read_rows: Collection[int] | None = None,
) -> BatchStream:
    """Returns an endless stream of batches whose rows are drawn from several sources.

    Args:
      sources: name -> (source, weight). A source gets the fraction weight / (sum of weights) of the rows; a weight of
        0 leaves it out. The order matters: each source gets a seed by its index.
      seed: the run's seed; the stream is a function of it and of the sources.
      final_weights: weights of sources after `steps` batches, towards which their weights move linearly; the other
        sources keep theirs. None or empty: all weights are constant.
      steps: batches of the run; at least 1 with final weights.
      read_rows: see BatchStream.

    Raises UserError for a negative weight, no positive one at the beginning or the end, or a source without data.
    """
    first = {name: weight for name, (_, weight) in sources.items()}
    last = first | dict(final_weights or {})
    for name, weight in (*first.items(), *last.items()):
        if not weight >= 0:
            raise UserError(f"source {name} has weight={weight}; use 0 or more")
    for weights, when in ((first, ""), (last, " at the end")):
        if not sum(weights.values()) > 0:
            raise UserError(
                f"none of the sources {list(sources)} has a weight above 0{when}; give one of them a weight"
            )
    seeds = dict(zip(sources, _seeds(seed, len(sources)), strict=True))
    mixed = {
        name: source.rows(seq_len=seq_len, batch_size=batch_size, seed=seeds[name])
        for name, (source, _) in sources.items()
        if first[name] > 0 or last[name] > 0
    }
    if final_weights:
        ends = [[weights[name] for name in mixed] for weights in (first, last)]
        rows = Mixture(list(mixed.values()), *ends, rows=steps * batch_size)
    else:
        rows = grain.IterDataset.mix(mixed, {name: first[name] for name in mixed})
    identity = {
        f"{name}.{key}": value for name, (source, _) in sources.items() for key, value in source.identity().items()
    }
    identity |= {"seq_len": seq_len, "batch_size": batch_size, "seed": seed}
    return BatchStream(rows, batch_size, identity, read_rows=read_rows)


def trace_batches(traces: Sequence[Trace], *, seq_len: int, batch_size: int, seed: int) -> BatchStream:
    """Returns an endless stream of conversations, shuffled anew in each epoch and packed whole into rows, first fit.

    A trace longer than a row is left out and counted in `dropped`.

    Args:
      traces: (token ids, mask); only tokens with a true mask, those of the assistant, are trained on.

    Raises UserError when no trace is left.
    """
    kept = [trace for trace in traces if len(trace[0]) <= seq_len]
    dropped = len(traces) - len(kept)
    if not kept:
        raise UserError(f"there are no traces to train on ({dropped} are longer than a row of {seq_len})")
    rows = TraceSource(kept).rows(seq_len=seq_len, batch_size=batch_size, seed=_seeds(seed, 1)[0])
    identity = {**TraceSource(traces).identity(), "seq_len": seq_len, "batch_size": batch_size, "seed": seed}
    return BatchStream(rows, batch_size, identity, dropped=dropped)


def heldout_batches(documents: Documents, *, seq_len: int, batch_size: int, eod: int) -> Iterator[PackedBatch]:
    """Yields batches of a single pass over the documents, in order; the last batch may end in empty rows.

    Documents are cut and ended as by DocumentSource, but short pieces are not cut again.
    """
    pieces = DocumentPieces(documents, seq_len, eod)
    tokens = [pieces[i]["tokens"] for i in range(len(pieces))]
    batches, _ = pack_documents(
        [(t, np.ones(len(t), np.float32)) for t in tokens], seq_len=seq_len, batch_size=batch_size
    )
    return iter(batches)


def _seeds(seed: int, count: int) -> list[int]:
    """Independent uint32 seeds. Grain adds the epoch to its seed, so that seeds 0, 1, 2 would share their orders."""
    return [int(s) for s in np.random.SeedSequence(seed).generate_state(count)]


def _tuples(state: Any) -> Any:
    """Lists as tuples, because JSON turns tuples into lists and Grain's packer compares with tuples."""
    if isinstance(state, dict):
        return {key: _tuples(value) for key, value in state.items()}
    return tuple(_tuples(value) for value in state) if isinstance(state, (list, tuple)) else state
