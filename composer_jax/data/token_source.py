"""Data sources: the contract of those of pretraining, documents (files as token ids), and traces (ids with a mask).

The table of sources is sources.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import grain
import numpy as np
from grain import experimental as grain_experimental

from composer_jax.data.packing import check_lengths
from composer_jax.data.text_tokenizer import TextTokenizer
from composer_jax.errors import UserError

IN_MEMORY = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
"""The data is in memory: reader threads would only compete for the interpreter lock."""


class TokenSource(Protocol):
    """An endless stream of training rows."""

    def rows(self, *, seq_len: int, batch_size: int, seed: int) -> grain.IterDataset:
        """Returns rows {"tokens": int32[S], "segments": int32[S], "weights": float32[S]} (data/packing.py).

        "tokens" may be a function without arguments that returns them. A process calls it for the rows that its devices
        hold, so that no process reads the whole of a source on disk.

        Args:
          seq_len: S, tokens of a row.
          batch_size: rows of a batch, for sources that pack a batch at a time.
          seed: uint32; fixes the order of the rows.
        """
        ...

    def identity(self) -> Mapping[str, int | str]:
        """Returns numbers that differ between different data, such as counts; a saved position is valid only where they
        are equal."""
        ...


@dataclass(frozen=True)
class SourceInputs:
    """What a source can be built from."""

    documents: Sequence[np.ndarray]
    """Token ids, int32[n] each, of the files to train on."""
    tokenizer: TextTokenizer
    seed: int
    """The run's seed."""


class TokenDocument(Protocol):
    """Token ids int[n]: an array, or what reads the ids of a slice when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: slice, /) -> np.ndarray: ...


Documents = Sequence[TokenDocument] | Sequence[np.ndarray]


class DocumentSource:
    """Endless full rows of documents.

    Each document gets `eod` at its end and is cut into pieces of at most `seq_len`. The pieces of all documents are
    shuffled, anew in each epoch; short ones share a row and are cut once more where they fill it. No row has padding.
    """

    def __init__(self, documents: Documents, eod: int) -> None:
        self._documents, self._eod = documents, eod

    def rows(self, *, seq_len: int, batch_size: int, seed: int) -> grain.IterDataset:
        """See TokenSource.rows. Raises UserError when there are no documents."""
        return full_rows(DocumentPieces(self._documents, seq_len, self._eod), seq_len, seed)

    def identity(self) -> Mapping[str, int | str]:
        """See TokenSource.identity."""
        return {"count": len(self._documents), "tokens": sum(len(document) for document in self._documents)}


class DocumentPieces:
    """A Grain data source: the documents, each ended by `eod`, cut into pieces of at most `seq_len` tokens.

    A document that fills its last piece goes without `eod`, because a piece of one token has nothing to predict.
    """

    def __init__(self, documents: Documents, seq_len: int, eod: int, dtype: type = np.int32) -> None:
        """dtype: of the pieces."""
        self._documents, self._seq_len, self._eod, self._dtype = documents, seq_len, eod, dtype
        counts = np.asarray([(len(d) + seq_len - 1) // seq_len for d in documents], np.int64)
        self._ends = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        document = int(np.searchsorted(self._ends, index, side="right"))
        tokens = self._documents[document]
        count = self._ends[document] - (self._ends[document - 1] if document else 0)
        start = int(index - (self._ends[document] - count)) * self._seq_len
        piece = tokens[start : start + self._seq_len].astype(self._dtype, copy=False)
        if len(piece) < self._seq_len:
            piece = np.append(piece, self._dtype(self._eod))
        return {"tokens": piece}


def full_rows(pieces: DocumentPieces, seq_len: int, seed: int) -> grain.IterDataset:
    """Returns endless rows of pieces, shuffled anew in each epoch. Raises UserError when there are no pieces."""
    if not len(pieces):
        raise UserError("there are no documents to train on; name a folder with source files")
    shuffled = grain.MapDataset.source(pieces).shuffle(seed).repeat().to_iter_dataset(IN_MEMORY)
    rows = grain_experimental.ConcatThenSplitIterDataset(shuffled, length_struct={"tokens": seq_len})

    def with_weights(row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        segments = row["tokens_segment_ids"]
        return {"tokens": row["tokens"], "segments": segments, "weights": np.ones(seq_len, np.float32)}

    return rows.map(with_weights)


Trace = tuple[Sequence[int] | np.ndarray, Sequence[bool] | np.ndarray]
"""Token ids int[n], and a mask bool[n] of those to train on."""


class TraceSource:
    """Endless rows of whole traces, shuffled anew in each epoch and packed first fit."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        self._traces = traces

    def rows(self, *, seq_len: int, batch_size: int, seed: int) -> grain.IterDataset:
        """See TokenSource.rows. Raises UserError when there are no traces, or one is longer than a row."""
        if not self._traces:
            raise UserError("there are no traces to train on; add some, or give the source no weight")
        check_lengths([len(tokens) for tokens, _ in self._traces], seq_len)
        items = [
            {"tokens": np.asarray(tokens, np.int32), "weights": np.asarray(mask, np.float32)}
            for tokens, mask in self._traces
        ]
        packed = grain_experimental.FirstFitPackIterDataset(
            grain.MapDataset.source(items).shuffle(seed).repeat().to_iter_dataset(IN_MEMORY),
            length_struct={"tokens": seq_len, "weights": seq_len},
            num_packing_bins=batch_size,  # one round of packing is one batch
            shuffle_bins=False,
        )
        return packed.map(
            lambda row: {"tokens": row["tokens"], "segments": row["tokens_segment_ids"], "weights": row["weights"]}
        )

    def identity(self) -> Mapping[str, int]:
        """See TokenSource.identity."""
        return {"count": len(self._traces), "tokens": sum(len(tokens) for tokens, _ in self._traces)}
