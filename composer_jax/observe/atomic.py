"""Files that are either the old one or the new one, never half of one."""

import os
import uuid
from pathlib import Path

from composer_jax.errors import UserError


def write_atomically(path: Path, data: bytes) -> Path:
    """Writes `data` to `path` through a file beside it and a rename; makes the folder; returns the path.

    A reader, and a run that goes on after a kill, see the old content or the new, never a torn file.

    Raises:
      UserError: the folder cannot be written or the disk is full.
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"cannot write {path}: {reason}; free some space or choose a folder that can be written"
        ) from error
    finally:
        draft.unlink(missing_ok=True)
    return path
