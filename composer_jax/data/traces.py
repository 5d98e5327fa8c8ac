"""Traces (token ids with a mask of those to train) as a data source: packed whole into rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import grain
import numpy as np
from grain import experimental as grain_experimental

from composer_jax.data.packing import check_lengths
from composer_jax.errors import UserError

IN_MEMORY = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
"""The data is in memory: reader threads would only compete for the interpreter lock."""

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
