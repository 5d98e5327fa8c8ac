"""Journal: an append-only file of JSON lines that survives a kill and, with `sync`, a power failure."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from composer_jax.atomic_write import write_atomically
from composer_jax.errors import UserError


class Journal:
    """A file of JSON objects, one per line.

    Opening an existing file drops an incomplete last line, which a kill in the middle of a write leaves; `read_journal`
    reads the others. Raises UserError if the file cannot be written.
    """

    def __init__(self, path: Path, before_write: Callable[[], None] | None = None, *, sync: bool = True):
        """before_write: called before every write, such as Workdir.require_held.

        sync: False leaves it to the system when rows reach the disk, so that a power failure may lose the last ones.
        """
        self.path, self._before_write, self._sync = path, before_write, sync
        content = path.read_bytes() if path.exists() else b""
        if not content.endswith(b"\n"):
            write_atomically(path, content[: content.rfind(b"\n") + 1])
        self._open()

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds one object; with `sync`, returns when it is on the disk."""
        self._check()
        self._file.write(_line(row))
        self._file.flush()
        if self._sync:
            os.fsync(self._file.fileno())

    def rewrite(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replaces all objects atomically."""
        self._check()
        self._file.close()
        write_atomically(self.path, b"".join(map(_line, rows)))
        self._open()

    def close(self) -> None:
        self._file.close()

    def _check(self) -> None:
        if self._before_write is not None:
            self._before_write()

    def _open(self) -> None:
        try:
            self._file = self.path.open("ab")
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from error


_NO_OBJECT = "is not a JSON object; move the folder away and start anew"


def read_journal(path: Path, refusal: str = _NO_OBJECT) -> list[dict[str, Any]]:
    """Returns the objects of a journal without an incomplete last line; [] if there is no such file.

    Raises UserError if a line before the last one is not a JSON object; `refusal` ends the sentence.
    """
    content = path.read_bytes() if path.exists() else b""
    rows = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UserError(f"line {number} of {path} {refusal}")
        rows.append(row)
    return rows


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"
