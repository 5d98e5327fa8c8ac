"""Mixture: rows of several sources whose weights change during a run (the weights of Grain's own mix are constant)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grain
import numpy as np


class Mixture(grain.IterDataset):
    """An endless mix of datasets. A source's weight moves linearly from its first to its last value, and stays there.

    The next row comes from the source that is furthest behind its share, so the order is fixed and every source has its
    share of any part of the run, up to a few rows.
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
