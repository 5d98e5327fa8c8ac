"""TensorBoard's event files as a sink of metrics."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

try:
    from tensorboardX import SummaryWriter
except ImportError as error:
    raise ImportError('it needs the package tensorboardX: pip install "composer_jax[tensorboard]"') from error


class TensorBoardSink:
    """Writes the numbers of rows as scalars of their steps into DIR/tensorboard/STAGE, for `tensorboard --logdir`.

    Event files cannot be cut. A file that begins after step s says so, and TensorBoard then ignores what older files of
    the folder have of later steps.
    """

    def __init__(self, workdir: Path, stage: str, config: Mapping[str, Any]):
        self._folder = workdir / "tensorboard" / stage
        self._writer: SummaryWriter | None = None

    def truncate_after(self, step: int) -> None:
        self.close()
        # The library names a file by the second, and would overwrite an older one of the same second.
        suffix = f".{time.time_ns()}"
        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1, filename_suffix=suffix)

    def write(self, row: Mapping[str, Any]) -> None:
        assert self._writer is not None
        for name, value in row.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
