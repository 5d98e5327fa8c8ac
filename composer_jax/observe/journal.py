"""Journal: an append-only file of JSON lines that survives a kill and a power failure."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from composer_jax.atomic_write import write_atomically
from composer_jax.errors import UserError


class Journal:
    """A file of JSON objects, one per line; a context manager.

    Opening an existing file drops an incomplete last line, which a kill in the middle of a write leaves.

    Attributes:
      rows: the objects in the file, oldest first.

    Raises:
      UserError: the file cannot be written, or a line before the last one is not a JSON object.
    """

    def __init__(self, path: Path, before_write: Callable[[], None] | None = None):
        """before_write: called before every write, such as Workdir.require_held."""
        self.path, self._before_write = path, before_write
        content = path.read_bytes() if path.exists() else b""
        self.rows = _parse_lines(path, content)
        if not content.endswith(b"\n"):
            write_atomically(path, b"".join(map(_line, self.rows)))
        self._open()

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds one object; returns when it is on the disk."""
        self._check()
        self._file.write(_line(row))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.rows.append(dict(row))

    def truncate(self, count: int) -> None:
        """Keeps the first `count` objects, by an atomic rewrite."""
        self._check()
        self._file.close()
        self.rows = self.rows[:count]
        write_atomically(self.path, b"".join(map(_line, self.rows)))
        self._open()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check(self) -> None:
        if self._before_write is not None:
            self._before_write()

    def _open(self) -> None:
        try:
            self._file = self.path.open("ab")
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from error


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a journal without an incomplete last line; [] if there is no such file.

    Raises:
      UserError: a line before the last one is not a JSON object.
    """
    return _parse_lines(path, path.read_bytes() if path.exists() else b"")


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _parse_lines(path: Path, content: bytes) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UserError(f"line {number} of {path} is not a JSON object; move the folder away and start anew")
        rows.append(row)
    return rows
