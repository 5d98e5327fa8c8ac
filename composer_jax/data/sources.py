"""Data sources of pretraining: ours by name, a user's by import path, mixed by weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from composer_jax.data.documents import Documents, DocumentSource
from composer_jax.data.prepared import PreparedSource, prepared
from composer_jax.data.text_sources import source_tree, text_rows
from composer_jax.data.token_source import SourceInputs, TokenSource
from composer_jax.errors import UserError
from composer_jax.extensions import resolve


@dataclass(frozen=True)
class SourceConfig:
    """One source of a run's pretraining data. Weights and sources are ours (not published).

    Raises:
      UserError: an unknown name or a negative weight; the message names the field.
    """

    kind: str = "documents"
    """One of SOURCES, or the import path of a function (SourceInputs, **options) -> TokenSource."""
    weight: float = 1.0
    """Share of the rows, relative to the weights of the other sources; 0 leaves the source out."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function that `kind` names."""
    final_weight: float | None = None
    """Weight after the last step, towards which the weight moves linearly; None keeps `weight`."""

    def __post_init__(self) -> None:
        if ":" not in self.kind:
            resolve(self.kind, SOURCES, "config.pretrain.sources.NAME.kind")
        for name in ("weight", "final_weight"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise UserError(f"a source of pretrain.sources has {name}={value}; use 0 or more.")


def documents(inputs: SourceInputs) -> DocumentSource:
    """The run's own documents."""
    return DocumentSource(inputs.documents, inputs.tokenizer.eod)


SOURCES: Mapping[str, Callable[..., TokenSource]] = {
    "documents": documents,
    "prepared": prepared,
    "source_tree": source_tree,
    "text_rows": text_rows,
}
"""Builders by SourceConfig.kind."""


def heldout_documents(sources: Mapping[str, tuple[TokenSource, float]]) -> dict[str, Documents]:
    """Returns name -> held-out documents, of the sources that have some: those of the kind "prepared"."""
    held = {name: source.heldout for name, (source, _) in sources.items() if isinstance(source, PreparedSource)}
    return {name: documents for name, documents in held.items() if len(documents)}


def make_sources(
    configs: Mapping[str, SourceConfig], inputs: SourceInputs, section: str = "pretrain"
) -> dict[str, tuple[TokenSource, float]]:
    """Returns name -> (source, weight): the run's own documents first, then the others by name.

    The place of a source decides its seed, so it must not depend on the order in which a config is written down.

    Args:
      section: the config's section that has the sources, as errors name it.

    Raises:
      UserError: an import path that does not resolve, or options that its function refuses.
    """
    sources: dict[str, tuple[TokenSource, float]] = {}
    for name, config in sorted(configs.items(), key=lambda item: (item[1].kind != "documents", item[0])):
        field = f"config.{section}.sources.{name}"
        build = resolve(config.kind, SOURCES, f"{field}.kind")
        try:
            source = build(inputs, **config.options)
        except TypeError as error:
            options = dict(config.options)
            raise UserError(f"{field}.options={options} do not fit {config.kind!r}: {error}.") from error
        sources[name] = source, config.weight
    return sources
