"""Shards: ArrayRecord files of token ids, written at once, and read at any place.

A record holds up to RECORD_TOKENS consecutive ids of one document, so that a piece of a long document is read without
the rest of it.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from composer_jax.errors import UserError

RECORD_TOKENS = 8192


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the dtype of stored ids: uint16 where the vocabulary allows, else uint32, little endian."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def write_shard(path: Path, documents: Iterable[np.ndarray]) -> dict[str, Any]:
    """Writes documents of ids, [n] each, to one file, atomically.

    Returns:
      {"file": its name, "bytes": its size, "sha256": of its content, "lengths": tokens of each document}.

    Raises UserError when the folder cannot be written, or the disk is full. There is no file then.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    lengths = []
    try:
        writer = ArrayRecordWriter(str(temporary), "group_size:1")
        for document in documents:
            lengths.append(len(document))
            for start in range(0, len(document), RECORD_TOKENS):
                writer.write(document[start : start + RECORD_TOKENS].tobytes())
        writer.close()
        with temporary.open("rb+") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # the library raises RuntimeError for errors of the file system
        raise UserError(
            f"cannot write {path}: {str(error).partition(';')[0]}; free some space or choose a folder that can be "
            "written"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return {"file": path.name, "bytes": size, "sha256": digest, "lengths": lengths}


def record_counts(lengths: np.ndarray) -> np.ndarray:
    """Returns int64[n]: the records of documents with these numbers of tokens."""
    return -(-lengths.astype(np.int64) // RECORD_TOKENS)


class ShardedDocuments(Sequence["ShardedDocument"]):
    """The documents of several shards, of which only the lengths are in memory."""

    def __init__(
        self,
        folder: Path,
        shards: Sequence[dict[str, Any]],
        lengths: np.ndarray,
        dtype: np.dtype,
        chosen: np.ndarray | None = None,
    ) -> None:
        """
        Args:
          folder: where the files are.
          shards: "file", "bytes" and "records" of each.
          lengths: tokens of every document of all shards, in order.
          dtype: that of `token_dtype`.
          chosen: bool for every document, whether it is one of these; None takes all.

        Raises UserError for a file that is missing or has another size than it was written with.
        """
        for shard in shards:
            path = folder / shard["file"]
            size = path.stat().st_size if path.exists() else 0
            if size != shard["bytes"]:
                raise UserError(
                    f"{path} has {size} bytes and was written with {shard['bytes']}; copy it again, or prepare the "
                    "data again"
                )
        self._paths = [f"{folder / shard['file']}[0:{shard['records']}]" for shard in shards]
        counts = record_counts(lengths)
        chosen = np.ones(len(lengths), bool) if chosen is None else chosen
        self._lengths, self._first, self._dtype = lengths[chosen], (np.cumsum(counts) - counts)[chosen], dtype
        self._source: Any = None

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: Any) -> ShardedDocument:
        return ShardedDocument(*self.range_of(index), self)

    def range_of(self, index: int) -> tuple[int, int]:
        """Returns the address of a document's first token, and the number of its tokens."""
        return int(self._first[index]) * RECORD_TOKENS, int(self._lengths[index])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the ids at the addresses from `start` to `stop`, which must be of one document.

        The address of a token is the number of its record, of all shards, times RECORD_TOKENS plus its place there.
        """
        first, end = start // RECORD_TOKENS, -(-stop // RECORD_TOKENS)
        records = [self.read_record(record) for record in range(first, end)] if start < stop else []
        if not records:
            return np.zeros(0, self._dtype)
        return np.concatenate(records)[start - first * RECORD_TOKENS : stop - first * RECORD_TOKENS]

    def read_record(self, record: int) -> np.ndarray:
        """Returns the ids of one record, of all shards."""
        if self._source is None:
            import grain

            self._source = grain.sources.ArrayRecordDataSource(self._paths)
        return np.frombuffer(self._source[record], self._dtype)


class AddressRange:
    """The addresses of the tokens of one document, int64[n]; `len` is their number."""

    def __init__(self, address: int, length: int) -> None:
        """address: of the first token."""
        self._addresses = range(address, address + length)

    def __len__(self) -> int:
        return len(self._addresses)

    def __getitem__(self, place: slice) -> np.ndarray:
        addresses = self._addresses[place]
        return np.arange(addresses.start, addresses.stop)


class ShardedDocument(AddressRange):
    """One document: a slice reads its tokens only."""

    def __init__(self, address: int, length: int, documents: ShardedDocuments) -> None:
        super().__init__(address, length)
        self._documents = documents

    def __getitem__(self, place: slice) -> np.ndarray:
        addresses = self._addresses[place]
        return self._documents.read(addresses.start, addresses.stop)


class DocumentAddresses(Sequence[AddressRange]):
    """The same documents with the addresses of their tokens in place of the ids: to be packed unread."""

    def __init__(self, documents: ShardedDocuments) -> None:
        self._documents = documents

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: Any) -> AddressRange:
        return AddressRange(*self._documents.range_of(index))
