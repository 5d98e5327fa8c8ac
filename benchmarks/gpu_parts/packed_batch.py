"""Training rows of eight unequal documents with 10 % padding."""

import numpy as np

DOCUMENTS, PADDING = 8, 0.1


def packed_segments(rows: int, length: int, seed: int = 0) -> np.ndarray:
    """Returns int32 [rows,length]: documents of a row, numbered from 1, then padding, 0.

    length: at least 16 tokens.
    """
    rng = np.random.default_rng(seed)
    tokens = length - round(PADDING * length)
    segments = np.zeros((rows, length), np.int32)
    for row in segments:
        lengths = 1 + rng.multinomial(tokens - DOCUMENTS, rng.dirichlet(np.full(DOCUMENTS, 2.0)))
        row[:tokens] = np.repeat(np.arange(1, DOCUMENTS + 1), lengths)
    return segments


def packed_batch(rows: int, length: int, vocab_size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns a batch of train/losses.py with random tokens; its weights are 1 except in padding."""
    segments = packed_segments(rows, length, seed)
    position = np.arange(length)
    starts = np.where(np.diff(segments, axis=1, prepend=0) != 0, position, 0)
    return {
        "tokens": np.random.default_rng(seed).integers(0, vocab_size, (rows, length)).astype(np.int32),
        "positions": (position - np.maximum.accumulate(starts, axis=1)).astype(np.int32),
        "segments": segments,
        "weights": (segments > 0).astype(np.float32),
    }


def whole_rows(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns a batch with the same tokens and weights in which a row is one document, without padding."""
    segments = np.ones_like(batch["segments"])
    return batch | {"segments": segments, "positions": np.cumsum(segments, axis=1, dtype=np.int32) - 1}
