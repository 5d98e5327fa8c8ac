"""TensorBoard's event files of the rows of a metrics file."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_jax.errors import UserError


def require_tensorboard() -> type:
    """Returns tensorboardX's SummaryWriter. Raises a UserError if the package is not installed."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise UserError(
            'config.tensorboard=True needs the package tensorboardX: pip install "composer_jax[tensorboard]"'
        ) from error
    return SummaryWriter


class EventFiles:
    """Writes the numbers of rows as scalars of their steps, into a folder that `tensorboard --logdir` shows.

    Event files cannot be cut. A file that begins after step s says so, and TensorBoard then ignores what older files of
    the folder have of later steps.
    """

    def __init__(self, folder: Path, step: int):
        """step: the last one of which the older files of the folder are valid."""
        self._folder, self._make = folder, require_tensorboard()
        self._open(step)

    def write(self, row: Mapping[str, Any]) -> None:
        """Writes a row of metrics; null has no event."""
        for name, value in row.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def truncate_after(self, step: int) -> None:
        """Makes the events of later steps invalid."""
        self._writer.close()
        self._open(step)

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()

    def _open(self, step: int) -> None:
        # The library names a file by the second, and would overwrite an older one of the same second.
        suffix = f".{time.time_ns()}"
        self._writer = self._make(str(self._folder), purge_step=step + 1, filename_suffix=suffix)
