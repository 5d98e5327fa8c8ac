"""The token cache: files -> token documents, encoded once and kept on disk between runs.

The name of a cache file is a hash of everything that its content depends on (the tokenizer, each file's name and
bytes), so that a changed corpus or tokenizer never gets stale tokens.
"""

import hashlib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from composer_jax.atomic_write import open_atomically
from composer_jax.data.corpus import CorpusFile
from composer_jax.data.text_tokenizer import TextTokenizer, encode_texts
from composer_jax.errors import UserError


def encode_files(
    tok: TextTokenizer,
    files: Sequence[CorpusFile],
    *,
    cache_dir: Path | str | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> list[np.ndarray]:
    """Returns one array of token ids per file, in order (uint16 if the vocabulary allows, else int32).

    The result is cached in `cache_dir`, from which the next call reads it; a damaged cache file is replaced.
    `progress` is called with the number of bytes of files encoded, or found in the cache, since its last call.
    """
    path = cache_file(tok, files, cache_dir) if cache_dir is not None else None
    documents = _read(path) if path else None
    if documents is not None and len(documents) == len(files):
        progress(sum(file.num_bytes for file in files))
        return documents
    dtype = np.uint16 if tok.vocab_size <= 2**16 else np.int32
    documents = []
    for file, ids in zip(files, encode_texts(tok, (file.read() for file in files), dtype), strict=True):
        documents.append(ids)
        progress(file.num_bytes)
    if path:
        tokens = np.concatenate(documents) if documents else np.zeros(0, np.uint16)
        with open_atomically(path) as opened:
            np.savez(opened, tokens=tokens, ends=np.cumsum([len(d) for d in documents], dtype=np.int64))
    return documents


def cache_file(tok: TextTokenizer, files: Sequence[CorpusFile], cache_dir: Path | str) -> Path:
    """Returns the path of the cache file of `encode_files`."""
    key = hashlib.sha256(tok.fingerprint.encode())
    for file in files:
        key.update(f"\0{file.name}\0{file.digest}".encode("utf-8", errors="surrogateescape"))
    return Path(cache_dir) / f"tokens-{key.hexdigest()[:16]}.npz"


def read_encoded(path: Path | str) -> list[np.ndarray]:
    """Reads a cache file, without the source files. Raises UserError if it is missing or damaged."""
    documents = _read(Path(path))
    if documents is None:
        raise UserError(f"{path} cannot be read; run the same command again, which replaces it")
    return documents


def _read(path: Path) -> list[np.ndarray] | None:
    """The documents; None if the file is missing or damaged, which the checksums of the zip format detect."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            tokens, ends = arrays["tokens"], arrays["ends"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return np.split(tokens, ends)[:-1]
