"""A file of traces: token ids and masks of conversations, encoded once and read by later stages."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from composer_jax.atomic_write import open_atomically
from composer_jax.data.token_source import Trace


def write_traces(path: Path, traces: Sequence[Trace], numbers: Mapping[str, Any] | None = None) -> Path:
    """Writes traces to an .npz file, 5 bytes per token before compression, and returns its path.

    numbers: name -> further arrays of the file.

    Raises UserError if the file cannot be written.
    """
    arrays: dict[str, Any] = {
        "tokens": np.concatenate([np.zeros(0, np.int32), *(np.asarray(tokens, np.int32) for tokens, _ in traces)]),
        "trained": np.concatenate([np.zeros(0, bool), *(np.asarray(trained, bool) for _, trained in traces)]),
        "lengths": np.array([len(tokens) for tokens, _ in traces], np.int32),
        **(numbers or {}),
    }
    with open_atomically(path) as file:
        np.savez_compressed(file, **arrays)
    return path


def read_traces(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns (tokens int32 [n], trained bool [n]) of every trace of a file of `write_traces`, in its order."""
    with np.load(path) as file:
        ends = np.cumsum(file["lengths"])
        tokens, trained = file["tokens"].astype(np.int32), file["trained"]
    return list(zip(np.split(tokens, ends)[:-1], np.split(trained, ends)[:-1], strict=True))
