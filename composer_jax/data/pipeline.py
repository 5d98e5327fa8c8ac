"""Grain pipelines: endless, shuffled, resumable streams of PackedBatch; one plain pass for held-out data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
from grain import experimental as grain_experimental

from composer_jax.data.packing import PackedBatch, TooLong, check_lengths, pack_documents, packed_batch
from composer_jax.demo.copying import copy_row
from composer_jax.errors import UserError

# Everything is in memory already: reader threads would only fight over the interpreter.
_IN_MEMORY = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)

Trace = tuple[Sequence[int], Sequence[bool]]
"""Token ids, and for each whether it is trained."""


class BatchStream:
    """An endless iterator of PackedBatch whose place can be saved and found again.

    `get_state` gives a small dictionary that JSON can hold; a stream made with the same arguments and given
    it by `set_state` goes on with exactly the batch that would have come next. `dropped` counts documents
    left out.
    """

    def __init__(self, dataset: grain.IterDataset, identity: dict[str, int], dropped: int = 0) -> None:
        self._iterator = iter(dataset)
        self._identity = identity
        self.dropped = dropped

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> PackedBatch:
        row = next(self._iterator)
        return packed_batch(row["tokens"], row["segments"], row["weights"])

    def get_state(self) -> dict[str, Any]:
        """The place in the stream, after the last batch taken."""
        return {"stream": dict(self._identity), "place": self._iterator.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a saved place. Raises UserError when it was saved by a stream over other data."""
        other = state["stream"]
        names = sorted(self._identity.keys() | other.keys())
        differences = [
            f"{name} was {other.get(name)} and is {self._identity.get(name)}"
            for name in names
            if other.get(name) != self._identity.get(name)
        ]
        if differences:
            raise UserError(
                f"the saved place belongs to other data ({'; '.join(differences)}); "
                "use the same data and settings, or a new folder"
            )
        self._iterator.set_state(_tuples(state["place"]))


def pretraining_batches(
    documents: Sequence[np.ndarray],
    *,
    seq_len: int,
    batch_size: int,
    seed: int,
    eod: int,
    vocab_size: int,
    copy_fraction: float = 0.0,
    exercises: Sequence[Trace] = (),
    exercise_fraction: float = 0.0,
) -> BatchStream:
    """Token documents, shuffled and repeated without end, in full rows, mixed with rows of two curricula.

    Each document gets `eod` at its end and is cut into pieces of at most `seq_len`; the pieces of all
    documents are shuffled, anew each epoch; short ones share a row, cut once more where that fills it. Such rows
    hold no padding.

    Args:
      copy_fraction: share of rows that come from `copying.copy_row`, 0 <= f <= 1.
      vocab_size: the copy curriculum draws from all ordinary ids below this.
      exercises: (token ids, mask), packed whole into rows of their own; only tokens whose mask is true are trained.
      exercise_fraction: share of those rows. What both curricula leave goes to the documents.
    """
    for name, share in (("copy_fraction", copy_fraction), ("exercise_fraction", exercise_fraction)):
        if not 0 <= share <= 1:
            raise UserError(f"{name}={share} is not a share of the rows; use 0 <= f <= 1")
    rest = 1 - copy_fraction - exercise_fraction
    if rest < -1e-9:
        raise UserError(f"copy_fraction={copy_fraction} and exercise_fraction={exercise_fraction} exceed all rows")
    order_seed, copy_seed, exercise_seed = _seeds(seed, 3)

    def source_row(row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        segments = row["tokens_segment_ids"]
        return {"tokens": row["tokens"], "segments": segments, "weights": np.ones(seq_len, np.float32)}

    def copying_row(index: int) -> dict[str, np.ndarray]:
        tokens, weights = copy_row(copy_seed, index, seq_len=seq_len, vocab_size=vocab_size)
        return {"tokens": tokens, "segments": np.ones(seq_len, np.int32), "weights": weights}

    sources: dict[str, tuple[grain.IterDataset, float]] = {}
    if rest > 1e-9:
        pieces = _Pieces(documents, seq_len, eod)
        if not len(pieces):
            raise UserError("there are no documents to train on; name a folder with source files")
        shuffled = grain.MapDataset.source(pieces).shuffle(order_seed).repeat().to_iter_dataset(_IN_MEMORY)
        rows = grain_experimental.ConcatThenSplitIterDataset(shuffled, length_struct={"tokens": seq_len})
        sources["documents"] = rows.map(source_row), rest
    if copy_fraction > 0:
        rows = grain.MapDataset.range(2**40).map(copying_row).to_iter_dataset(_IN_MEMORY)
        sources["copying"] = rows, copy_fraction
    if exercise_fraction > 0:
        if not exercises:
            raise UserError(f"exercise_fraction={exercise_fraction} of the rows, and there are no exercises; add some")
        sources["exercises"] = _packed(exercises, seq_len, batch_size, exercise_seed), exercise_fraction
    mixed = grain.IterDataset.mix(
        {name: rows for name, (rows, _) in sources.items()},
        {name: share for name, (_, share) in sources.items()},
    )
    return BatchStream(
        mixed.batch(batch_size),
        _identity(
            [len(d) for d in documents] + [len(tokens) for tokens, _ in exercises],
            seq_len=seq_len,
            batch_size=batch_size,
            seed=seed,
        ),
    )


def trace_batches(
    traces: Sequence[Trace],
    *,
    seq_len: int,
    batch_size: int,
    seed: int,
    too_long: TooLong = "error",
) -> BatchStream:
    """Conversations, shuffled and repeated without end, packed whole into rows, first fit.

    Args:
      traces: (token ids, mask); only the tokens whose mask is true are trained on: what the assistant said.
      too_long: what to do with a trace longer than a row: "error", or "drop" (`dropped` counts them).
    """
    lengths = [len(tokens) for tokens, _ in traces]
    left_out = set(check_lengths(lengths, seq_len=seq_len, too_long=too_long))
    kept = [trace for i, trace in enumerate(traces) if i not in left_out]
    if not kept:
        raise UserError(f"there are no traces to train on ({len(left_out)} are longer than a row of {seq_len})")
    rows = _packed(kept, seq_len, batch_size, _seeds(seed, 1)[0])
    identity = _identity(lengths, seq_len=seq_len, batch_size=batch_size, seed=seed)
    return BatchStream(rows.batch(batch_size), identity, dropped=len(left_out))


def heldout_batches(
    documents: Sequence[np.ndarray], *, seq_len: int, batch_size: int, eod: int
) -> Iterator[PackedBatch]:
    """One pass over the documents, in order, every token once; the last batch ends in empty rows.

    Documents are cut and ended as in `pretraining_batches`, but a short piece is never cut again.
    """
    pieces = _Pieces(documents, seq_len, eod)
    tokens = [pieces[i]["tokens"] for i in range(len(pieces))]
    batches, _ = pack_documents(
        [(t, np.ones(len(t), np.float32)) for t in tokens], seq_len=seq_len, batch_size=batch_size
    )
    return iter(batches)


def _packed(traces: Sequence[Trace], seq_len: int, batch_size: int, order_seed: int) -> grain.IterDataset:
    """Endless rows of whole traces, shuffled anew each epoch. Raises UserError for one that is longer than a row."""
    check_lengths([len(tokens) for tokens, _ in traces], seq_len=seq_len, too_long="error")
    items = [
        {"tokens": np.asarray(tokens, np.int32), "weights": np.asarray(mask, np.float32)} for tokens, mask in traces
    ]
    packed = grain_experimental.FirstFitPackIterDataset(
        grain.MapDataset.source(items).shuffle(order_seed).repeat().to_iter_dataset(_IN_MEMORY),
        length_struct={"tokens": seq_len, "weights": seq_len},
        num_packing_bins=batch_size,  # one round of packing is one batch
        shuffle_bins=False,
    )
    return packed.map(
        lambda row: {
            "tokens": row["tokens"],
            "segments": row["tokens_segment_ids"],
            "weights": row["weights"],
        }
    )


class _Pieces:
    """A Grain data source: the documents, each ended by `eod`, cut into pieces of at most `seq_len` tokens.

    A document that fills its last piece goes without `eod`: a piece of one token has nothing to predict.
    """

    def __init__(self, documents: Sequence[np.ndarray], seq_len: int, eod: int) -> None:
        self._documents, self._seq_len, self._eod = documents, seq_len, eod
        counts = np.asarray([(len(d) + seq_len - 1) // seq_len for d in documents], np.int64)
        self._ends = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        document = int(np.searchsorted(self._ends, index, side="right"))
        tokens = self._documents[document]
        count = self._ends[document] - (self._ends[document - 1] if document else 0)
        start = int(index - (self._ends[document] - count)) * self._seq_len
        piece = tokens[start : start + self._seq_len].astype(np.int32)
        if len(piece) < self._seq_len:
            piece = np.append(piece, np.int32(self._eod))
        return {"tokens": piece}


def _identity(lengths: Sequence[int], **arguments: int) -> dict[str, int]:
    """What has to be the same for a saved place to mean the same batch."""
    return {"documents": len(lengths), "tokens": int(sum(lengths)), **arguments}


def _seeds(seed: int, count: int) -> list[int]:
    """Independent 32-bit seeds. Grain adds the epoch to its seed, so 0, 1, 2 would share their orders."""
    return [int(s) for s in np.random.SeedSequence(seed).generate_state(count)]


def _tuples(state: Any) -> Any:
    """JSON turns tuples into lists, and Grain's packer compares with tuples."""
    if isinstance(state, dict):
        return {key: _tuples(value) for key, value in state.items()}
    return tuple(_tuples(value) for value in state) if isinstance(state, (list, tuple)) else state
