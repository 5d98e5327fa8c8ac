"""Pretraining text beside the run's own documents: further source trees, and rows of JSON lines or Parquet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from composer_jax.data.corpus import find_corpus
from composer_jax.data.documents import DocumentSource
from composer_jax.data.row_files import read_rows
from composer_jax.data.text_tokenizer import TextTokenizer
from composer_jax.data.token_source import SourceInputs
from composer_jax.errors import UserError
from composer_jax.storage.local_copy import local_copy

BATCH = 256
"""Texts that are encoded at once."""


def source_tree(
    inputs: SourceInputs, path: str, extensions: Sequence[str] = (".py",), max_bytes: int | None = None
) -> DocumentSource:
    """Returns the source files below a folder, of this machine or at a URL, as documents; nothing is held out.

    Args:
      extensions: endings of the files that are read.
      max_bytes: bytes after which no more files are taken; None takes every file.

    Raises:
      UserError: a folder that is missing or holds no such files.
    """
    corpus = find_corpus(local_copy(path), extensions=extensions, heldout_fraction=0.0, max_bytes=max_bytes)
    return _documents(inputs.tokenizer, (file.read() for file in corpus.train))


def text_rows(
    inputs: SourceInputs, files: str | Sequence[str], field: str = "text", max_bytes: int | None = None
) -> DocumentSource:
    """Returns the texts in rows of JSON lines or Parquet as documents.

    Args:
      files: a path or URL (gs://...), or several.
      field: the key of the text in a row.
      max_bytes: bytes of UTF-8 after which no more rows are taken; None takes every row.

    Raises:
      UserError: a file that cannot be read, or a row without text, named with its file and line.
    """
    paths = (files,) if isinstance(files, str) else tuple(files)
    return _documents(inputs.tokenizer, _texts(paths, field, max_bytes))


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


def _documents(tok: TextTokenizer, texts: Iterable[str]) -> DocumentSource:
    documents: list[np.ndarray] = []
    waiting: list[str] = []
    for text in texts:
        waiting.append(text)
        if len(waiting) == BATCH:
            documents += [np.asarray(ids, np.int32) for ids in tok.encode_batch(waiting)]
            waiting = []
    documents += [np.asarray(ids, np.int32) for ids in tok.encode_batch(waiting)]
    return DocumentSource(documents, tok.eod)
