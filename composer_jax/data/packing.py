"""Packing: documents of any length -> rows of a fixed length, several documents per row, separated by segments."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from composer_jax.errors import UserError

UNREAD = -1
"""Stands for the token ids of a row that this process did not read, because its devices hold other rows."""


@dataclass(frozen=True)
class PackedBatch:
    """B rows of S tokens for the learner. Padding is zero in every field."""

    tokens: np.ndarray
    """int32[B, S]; UNREAD for the documents of a row that this process did not read."""
    positions: np.ndarray
    """int32[B, S], from 0 in every document."""
    segments: np.ndarray
    """int32[B, S]: the documents of a row numbered from 1; 0 is padding. Attention stays within a segment."""
    weights: np.ndarray
    """float32[B, S]: the loss weight of *predicting* tokens[b, t]; 0 for the first token of a document."""


@dataclass(frozen=True)
class Packing:
    """The documents of each row, by `plan_packing`."""

    rows: tuple[tuple[int, ...], ...]
    """Indices of the documents of each row, in order. Rows may be empty, as padding up to whole batches."""
    lengths: tuple[int, ...]
    """Tokens of each document."""
    seq_len: int

    def spans(self) -> Iterator[tuple[int, int, int, int]]:
        """Yields (document, row, start, stop) for every packed document."""
        for row, documents in enumerate(self.rows):
            start = 0
            for document in documents:
                stop = start + self.lengths[document]
                yield document, row, start, stop
                start = stop

    def place(self, values: Sequence[np.ndarray], dtype: np.dtype | type, fill: int = 0) -> np.ndarray:
        """Packs per-token values of every document, [n_i, ...], into [rows, S, ...]; `fill` elsewhere.

        The values may be tokens, advantages, log-probabilities, routes.
        """
        trailing = np.shape(values[0])[1:] if len(values) else ()
        out = np.full((len(self.rows), self.seq_len, *trailing), fill, dtype)
        for document, row, start, stop in self.spans():
            if len(values[document]) != stop - start:
                raise ValueError(f"document {document} has {stop - start} tokens but {len(values[document])} values")
            out[row, start:stop] = values[document]
        return out

    def segments(self) -> np.ndarray:
        """Returns int32[rows, S]: the documents of each row numbered from 1, 0 for padding."""
        out = np.zeros((len(self.rows), self.seq_len), np.int32)
        count = [0] * len(self.rows)
        for _, row, start, stop in self.spans():
            count[row] += 1
            out[row, start:stop] = count[row]
        return out


def plan_packing(lengths: Sequence[int], *, seq_len: int, batch_size: int = 1) -> Packing:
    """Packs first fit: each document, whole and in the order given, goes into the first row with room for it.

    The number of rows is rounded up to a multiple of `batch_size`.

    Raises:
      UserError: a document is longer than `seq_len`.
      ValueError: a document is empty.
    """
    check_lengths(lengths, seq_len)
    rows: list[list[int]] = []
    room = np.zeros(max(1, len(lengths)), np.int64)  # one row per document is the worst case
    for document, length in enumerate(lengths):
        row = int(np.argmax(room[: len(rows) + 1] >= length)) if rows else 0
        if row >= len(rows) or room[row] < length:
            row = len(rows)
            rows.append([])
            room[row] = seq_len
        rows[row].append(document)
        room[row] -= length
    rows += [[] for _ in range(-len(rows) % batch_size)]
    return Packing(tuple(map(tuple, rows)), tuple(lengths), seq_len)


def check_lengths(lengths: Sequence[int], seq_len: int) -> None:
    """Raises UserError for documents longer than `seq_len`, ValueError for empty ones."""
    if any(length < 1 for length in lengths):
        raise ValueError(f"document {next(i for i, n in enumerate(lengths) if n < 1)} is empty")
    if longer := sum(length > seq_len for length in lengths):
        raise UserError(
            f"{longer} of {len(lengths)} documents are longer than a row of {seq_len} tokens "
            f"(the longest has {max(lengths)}); use a longer row, or drop them"
        )


def pack_documents(
    documents: Sequence[tuple[Sequence[int] | np.ndarray, Sequence[float] | np.ndarray]],
    *,
    seq_len: int,
    batch_size: int,
) -> tuple[list[PackedBatch], Packing]:
    """Packs (tokens, weights) documents into batches by `plan_packing`; the last batch may end in empty rows.

    weights[t] is the loss weight of predicting token t; that of a document's first token is ignored.
    """
    packing = plan_packing([len(tokens) for tokens, _ in documents], seq_len=seq_len, batch_size=batch_size)
    whole = packed_batch(
        packing.place([np.asarray(tokens, np.int32) for tokens, _ in documents], np.int32),
        packing.segments(),
        packing.place([np.asarray(weights, np.float32) for _, weights in documents], np.float32),
    )
    cuts = range(0, len(whole.tokens), batch_size)
    return [PackedBatch(*(field[i : i + batch_size] for field in vars(whole).values())) for i in cuts], packing


def packed_batch(tokens: np.ndarray, segments: np.ndarray, weights: np.ndarray) -> PackedBatch:
    """Makes a batch from tokens, segments and weights, [B, S] each: adds positions, zeroes first tokens' weights."""
    inside = segments > 0
    first = inside.copy()
    first[:, 1:] &= segments[:, 1:] != segments[:, :-1]
    column = np.arange(tokens.shape[1], dtype=np.int32)[None, :]
    start = np.maximum.accumulate(np.where(first, column, 0), axis=1)
    return PackedBatch(
        tokens=np.where(inside, tokens, 0).astype(np.int32),
        positions=np.where(inside, column - start, 0).astype(np.int32),
        segments=segments.astype(np.int32),
        weights=np.where(inside & ~first, weights, 0).astype(np.float32),
    )
