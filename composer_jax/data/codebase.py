"""A codebase as one text: its source files in alphabetical order, each under a line with its path."""

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from composer_jax.data.prepare.config import PrepareConfig
from composer_jax.data.prepare.filters import filter_text, reason_by_path
from composer_jax.data.prepare.languages import TEXT, language_of
from composer_jax.data.prepare.layout import path_header, printable_path, with_line_end
from composer_jax.data.text_tokenizer import TextTokenizer, encode_texts
from composer_jax.errors import UserError


@dataclass(frozen=True)
class Codebase:
    """The source files of a folder."""

    files: Mapping[str, str]
    """Path below the folder -> the file's text under its header, by the alphabet."""
    left_out: Mapping[str, Sequence[str]]
    """Reason (data/prepare/filters.py) -> the paths that are left out for it."""


@dataclass(frozen=True)
class CodebaseTokens:
    """N token ids of F files, one after the other, and the id that ends a document."""

    ids: np.ndarray
    """int32[N]."""
    paths: Sequence[str]
    starts: np.ndarray
    """int64[F + 1]: where each file begins, and where the last one ends."""
    num_bytes: np.ndarray
    """int64[F]: UTF-8 bytes of each file with its header."""


def read_codebase(folder: Path, extensions: Sequence[str] = ()) -> Codebase:
    """Reads the files of a folder that `launch.prepare_data` would take, but for duplicates.

    Hidden folders, vendored and built ones, and links are passed over; they are not in `left_out`.

    Args:
      extensions: endings of the names of source files; none reads all languages of data/prepare/languages.py.

    Raises UserError when the folder cannot be read, or no file is left.
    """
    endings = tuple(ending if ending.startswith(".") else f".{ending}" for ending in extensions)
    left_out: dict[str, list[str]] = {}
    paths = _walk(folder, left_out)
    paths = sorted(path for path in paths if (path.endswith(endings) if endings else language_of(path)))
    files = {}
    for path in paths:
        text, reason = _read(folder, path)
        if reason is None:
            files[path] = path_header(path) + with_line_end(text)
        else:
            left_out.setdefault(reason, []).append(path)
    if not files:
        reasons = "".join(f", {len(paths)} left out ({reason})" for reason, paths in left_out.items())
        raise UserError(f"{folder} holds no source file that can be read{reasons}; name another folder or extension")
    return Codebase(files, left_out)


def encode_codebase(codebase: Codebase, tok: TextTokenizer) -> CodebaseTokens:
    """Encodes a codebase as one document. No token spans two files."""
    pieces = list(encode_texts(tok, codebase.files.values()))
    return CodebaseTokens(
        ids=np.concatenate([*pieces, np.array([tok.eod], np.int32)]),
        paths=[printable_path(path) for path in codebase.files],
        starts=np.cumsum([0, *map(len, pieces)]),
        num_bytes=np.array([len(text.encode()) for text in codebase.files.values()]),
    )


def _walk(folder: Path, left_out: dict[str, list[str]]) -> Iterator[str]:
    """Yields the relative paths of regular files."""

    def on_error(error: OSError) -> None:
        if error.filename is None or Path(error.filename) == folder:
            raise UserError(f"the folder {folder} cannot be read ({error.strerror}); make it readable") from error
        left_out.setdefault("unreadable", []).append(f"{Path(error.filename).relative_to(folder).as_posix()}/")

    for parent, folders, names in os.walk(folder, onerror=on_error):
        below = "" if Path(parent) == folder else f"{Path(parent).relative_to(folder).as_posix()}/"
        own = (name for name in folders if not name.startswith("."))
        folders[:] = [name for name in own if reason_by_path(f"{below}{name}/", TEXT, ()) not in ("vendored", "built")]
        for name in names:
            if stat.S_ISREG(os.lstat(f"{parent}/{name}").st_mode):  # a link would be read twice, a pipe would block
                yield below + name


def _read(folder: Path, path: str) -> tuple[str, str | None]:
    """Returns (text, None), or ("", why the file is left out)."""
    language = language_of(path) or TEXT
    if reason := reason_by_path(path, language, ()):
        return "", reason
    try:
        if (folder / path).stat().st_size > PrepareConfig.max_file_bytes:
            return "", "too large"
        data = (folder / path).read_bytes()
    except OSError:
        return "", "unreadable"
    return filter_text(data, language, path)
