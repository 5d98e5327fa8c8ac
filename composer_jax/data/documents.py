"""Documents (files as token ids) as a data source: cut into pieces, shuffled, and joined into full rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import grain
import numpy as np
from grain import experimental as grain_experimental

from composer_jax.data.traces import IN_MEMORY
from composer_jax.errors import UserError


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
