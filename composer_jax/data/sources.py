"""Data sources of pretraining: ours by name, a user's by import path, mixed by weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grain
import numpy as np

from composer_jax.data.documents import DocumentSource
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.errors import UserError
from composer_jax.extensions import resolve


class TokenSource(Protocol):
    """An endless stream of training rows."""

    def rows(self, *, seq_len: int, batch_size: int, seed: int) -> grain.IterDataset:
        """Returns rows {"tokens": int32[S], "segments": int32[S], "weights": float32[S]} (data/packing.py).

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
class SourceConfig:
    """One source of a run's pretraining data. Weights and sources are ours (not published).

    Raises:
      UserError: an unknown name or a negative weight; the message names the field.
    """

    name: str = "documents"
    """One of SOURCES, or the import path of a function (SourceInputs, **options) -> TokenSource."""
    weight: float = 1.0
    """Share of the rows, relative to the weights of the other sources; 0 leaves the source out."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function that `name` names."""

    def __post_init__(self) -> None:
        if ":" not in self.name:
            resolve(self.name, SOURCES, "pretrain.sources.name")
        if not self.weight >= 0:
            raise UserError(f"pretrain.sources: {self.name} has weight={self.weight}; use 0 or more.")


@dataclass(frozen=True)
class SourceInputs:
    """What a source can be built from."""

    documents: Sequence[np.ndarray]
    """Token ids, int32[n] each, of the files to train on."""
    tokenizer: Tokenizer
    seed: int
    """The run's seed."""


def documents(inputs: SourceInputs) -> DocumentSource:
    """The run's own documents."""
    return DocumentSource(inputs.documents, inputs.tokenizer.eod)


SOURCES: Mapping[str, Callable[..., TokenSource]] = {"documents": documents}
"""Builders by SourceConfig.name."""


def make_sources(configs: Sequence[SourceConfig], inputs: SourceInputs) -> dict[str, tuple[TokenSource, float]]:
    """Builds (source, weight) of every config, by its name, in the order given.

    Raises:
      UserError: two sources of one name, an import path that does not resolve, or options that its function refuses.
    """
    sources: dict[str, tuple[TokenSource, float]] = {}
    for config in configs:
        if config.name in sources:
            raise UserError(f"pretrain.sources names {config.name} twice; give it once with the sum of the weights.")
        build = resolve(config.name, SOURCES, "pretrain.sources.name")
        try:
            source = build(inputs, **config.options)
        except TypeError as error:
            raise UserError(
                f"pretrain.sources: {config.name} refuses options={dict(config.options)}: {error}"
            ) from error
        sources[config.name] = source, config.weight
    return sources
