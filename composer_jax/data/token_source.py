"""The contract of a data source of pretraining, and what its builder gets. The table of sources is sources.py."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import grain
import numpy as np

from composer_jax.data.text_tokenizer import TextTokenizer


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
