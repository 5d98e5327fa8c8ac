"""Data sources of pretraining: ours by name, a user's by import path, mixed by weight."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_jax.data.corpus import find_corpus
from composer_jax.data.prepared import PreparedSource, prepared
from composer_jax.data.row_files import read_rows
from composer_jax.data.text_tokenizer import encode_texts
from composer_jax.data.token_source import Documents, DocumentSource, SourceInputs, TokenSource
from composer_jax.errors import UserError
from composer_jax.extensions import resolve
from composer_jax.storage.local_copy import local_copy


@dataclass(frozen=True)
class SourceConfig:
    """One source of a run's pretraining data. Weights and sources are ours (not published).

    Raises UserError for an unknown name or a negative weight; the message names the field.
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


def source_tree(
    inputs: SourceInputs, path: str, extensions: Sequence[str] = (".py",), max_bytes: int | None = None
) -> DocumentSource:
    """Returns the source files below a folder, of this machine or at a URL, as documents; nothing is held out.

    Args:
      extensions: endings of the files that are read.
      max_bytes: bytes after which no more files are taken; None takes every file.

    Raises UserError for a folder that is missing or holds no such files.
    """
    corpus = find_corpus(local_copy(path), extensions=extensions, heldout_fraction=0.0, max_bytes=max_bytes)
    return _document_source(inputs, (file.read() for file in corpus.train))


def text_rows(
    inputs: SourceInputs, files: str | Sequence[str], field: str = "text", max_bytes: int | None = None
) -> DocumentSource:
    """Returns the texts in rows of JSON lines or Parquet as documents.

    Args:
      files: a path or URL (gs://...), or several.
      field: the key of the text in a row.
      max_bytes: bytes of UTF-8 after which no more rows are taken; None takes every row.

    Raises UserError for a file that cannot be read, or a row without text, named with its file and line.
    """
    paths = (files,) if isinstance(files, str) else tuple(files)
    return _document_source(inputs, _texts(paths, field, max_bytes))


def _texts(paths: Sequence[str], field: str, max_bytes: int | None) -> Iterator[str]:
    total = 0
    for path in paths:
        for place, row in read_rows(str(Path(path).expanduser()) if path.startswith("~") else path):
            if not isinstance(row, Mapping) or not isinstance(row.get(field), str) or not row[field]:
                raise UserError(f"{place} has no text in the field {field!r}; name its field as options.field.")
            total += len(row[field].encode("utf-8", errors="replace"))
            if max_bytes is not None and total > max_bytes:
                return
            yield row[field]


def _document_source(inputs: SourceInputs, texts: Iterable[str]) -> DocumentSource:
    return DocumentSource(list(encode_texts(inputs.tokenizer, texts)), inputs.tokenizer.eod)


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

    Raises UserError for an import path that does not resolve, or options that its function refuses.
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
