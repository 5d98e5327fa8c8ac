"""Prepared shards (launch/prepare_data.py) as a data source: read from disk at random, a piece at a time."""

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import grain
import numpy as np

from composer_jax.data.prepare.shards import DocumentAddresses, ShardedDocuments
from composer_jax.data.text_tokenizer import TextTokenizer
from composer_jax.data.token_source import (
    DocumentPieces,
    Documents,
    DocumentSource,
    SourceInputs,
    TokenDocument,
    full_rows,
)
from composer_jax.errors import UserError
from composer_jax.storage.local_copy import local_copy

_END = -1
"""What stands for the end of a document among the addresses of its tokens."""


class PreparedSource(DocumentSource):
    """Endless full rows of prepared documents (see DocumentSource), of which memory holds about 20 bytes each.

    The packer sees addresses of tokens instead of ids, so every process knows the segments of every row, and the
    position in the data, without reading. It reads the ids of the rows that it needs.
    """

    def __init__(self, documents: ShardedDocuments, heldout: Documents, eod: int, fingerprint: str) -> None:
        """heldout: documents of the same sources, which are not in the rows."""
        super().__init__(documents, eod)
        self._shards, self.heldout, self._fingerprint = documents, heldout, fingerprint

    def rows(self, *, seq_len: int, batch_size: int, seed: int) -> grain.IterDataset:
        """See TokenSource.rows; the tokens are functions. Raises UserError when there are no documents."""
        pieces = DocumentPieces(DocumentAddresses(self._shards), seq_len, _END, np.int64)
        rows = full_rows(pieces, seq_len, seed)
        return rows.map(lambda row: row | {"tokens": functools.partial(self._read, row["tokens"], row["segments"])})

    def _read(self, addresses: np.ndarray, segments: np.ndarray) -> np.ndarray:
        """Returns the token ids, int32[S], of a row of addresses. Those of a segment follow each other."""
        tokens = np.full(len(addresses), self._eod, np.int32)
        bounds = [*np.flatnonzero(np.diff(segments, prepend=0)), len(segments)]
        for start, stop in itertools.pairwise(bounds):
            address, length = int(addresses[start]), int(stop - start) - int(addresses[stop - 1] == _END)
            tokens[start : start + length] = self._shards.read(address, address + length)
        return tokens

    def identity(self) -> Mapping[str, int | str]:
        """See TokenSource.identity. The fingerprint is a hash of the content of all shards."""
        return {**super().identity(), "fingerprint": self._fingerprint}


def prepared(
    inputs: SourceInputs, path: str, sources: Sequence[str] = (), max_heldout_tokens: int = 100_000
) -> PreparedSource:
    """Returns the training documents in a folder, or at a URL, that launch.prepare_data wrote.

    Args:
      sources: only documents of these sources, as --source named them, so that a config can weigh each; empty takes
        all.
      max_heldout_tokens: tokens of held-out documents after which pretraining measures no more of them.

    Raises UserError for a missing folder, an unfinished one, a source that it lacks, damaged shards, or shards of
    another tokenizer.
    """
    folder = local_copy(path)
    index = _read_index(folder, path)
    documents = _documents(folder, index, "train", inputs.tokenizer, tuple(sources))
    heldout: list[TokenDocument] = []
    if not sources or set(sources) & set(index["heldout"]["sources"]):
        known = tuple(source for source in sources if source in index["heldout"]["sources"])
        tokens = 0
        for document in _documents(folder, index, "heldout", inputs.tokenizer, known):
            if tokens >= max_heldout_tokens:
                break
            heldout.append(document)
            tokens += len(document)
    return PreparedSource(documents, heldout, inputs.tokenizer.eod, index["fingerprint"])


def prepared_documents(path: str, split: Literal["train", "heldout"], tok: TextTokenizer) -> ShardedDocuments:
    """Returns the documents of one side, such as those for `heldout_batches`. Raises UserError as `prepared`."""
    folder = local_copy(path)
    return _documents(folder, _read_index(folder, path), split, tok, ())


def _read_index(folder: Path, path: str) -> dict[str, Any]:
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} has no index.json; finish its preparation with launch.prepare_data first") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}/index.json cannot be read ({error}); copy it again") from error
    return index


def _documents(
    folder: Path, index: Mapping[str, Any], split: str, tok: TextTokenizer, sources: tuple[str, ...]
) -> ShardedDocuments:
    made_with, part = index["tokenizer"], index[split]
    if made_with["fingerprint"] != tok.fingerprint:
        raise UserError(
            f"{folder} was prepared with the tokenizer {made_with['path']} ({made_with['fingerprint']}), and this run "
            f"has another one ({tok.fingerprint}); prepare the data with the tokenizer of this run"
        )
    if unknown := [source for source in sources if source not in part["sources"]]:
        raise UserError(f"{folder} has no source {unknown[0]!r}; use some of {', '.join(part['sources'])}")
    with np.load(folder / f"{split}.documents.npz") as saved:
        lengths, source_numbers = saved["lengths"], saved["sources"]
    chosen = np.isin(source_numbers, [part["sources"].index(source) for source in sources or part["sources"]])
    return ShardedDocuments(folder, part["shards"], lengths, np.dtype(index["dtype"]), chosen)
