"""Atomic file writes: a reader sees the old content or the new, never a part."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from composer_jax.errors import UserError


def write_atomically(path: str | Path, data: bytes) -> Path:
    """Writes `data` to `path` through a temporary file beside it and a rename; creates the folder; returns the path.

    Raises:
      UserError: the folder cannot be written or the disk is full. The old content stays.
    """
    with open_atomically(path) as file:
        file.write(data)
    return Path(path)


@contextlib.contextmanager
def open_atomically(path: str | Path) -> Iterator[BinaryIO]:
    """Opens a temporary file for writing and, if the block succeeds, flushes it to disk and renames it to `path`.

    Raises:
      UserError: as `write_atomically`.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"cannot write {path}: {reason}; free some space or choose a folder that can be written"
        ) from error
