"""Traces of JAX's profiler of some steps of a stage, for XProf and Perfetto (docs/performance.md)."""

import dataclasses
import re
from pathlib import Path
from typing import Self

import jax
from absl import logging
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

from composer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    """What of a run is traced. It changes nothing that the run computes, and may differ when the run goes on."""

    steps: str = ""
    """Steps of every training stage, FIRST:LAST, such as 10:12, of which DIR/profile/STAGE gets a trace; empty: none.
    The first steps compile."""

    def __post_init__(self) -> None:
        if self.steps and self._ends is None:
            raise UserError(f"config.profile.steps={self.steps!r} is not FIRST:LAST; write for instance 10:12.")

    @property
    def traced(self) -> range:
        """The steps."""
        first, last = self._ends or (1, 0)
        return range(first, last + 1)

    @property
    def _ends(self) -> tuple[int, int] | None:
        match = re.fullmatch(r"(\d+):(\d+)", self.steps)
        ends = (int(match[1]), int(match[2])) if match else None
        return ends if ends and 1 <= ends[0] <= ends[1] else None


def require_profiler(config: ProfileConfig) -> None:
    """Raises UserError if the steps of `config` cannot be traced in this process, whose devices are known.

    JAX's profiler asks every plugin that was loaded. libtpu's ends the process with a segmentation fault (seen with
    0.0.51) where there is no TPU, and is loaded where JAX may choose the platform.
    """
    platform = jax.default_backend()
    if config.steps and platform != "tpu" and xla_client.pjrt_plugin_loaded("tpu"):
        name = "cuda" if platform == "gpu" else platform
        raise UserError(
            f"config.profile.steps={config.steps}: this process has loaded libtpu and has no TPU, and JAX's profiler "
            f"would end it with a segmentation fault; set JAX_PLATFORMS={name} in the environment, or uninstall libtpu."
        )


class StepTrace:
    """A context manager that traces the steps of a range.

    JAX's profiler sees all devices and threads of this process, so what else works meanwhile is in the trace, too.

    Attributes:
      folder: gets the files of every process, in plugins/profile/TIME.
      steps: the steps.
      is_written: whether the trace is there.
    """

    def __init__(self, folder: Path, steps: range) -> None:
        self.folder, self.steps = folder, steps
        self._is_tracing = self.is_written = False

    def begin(self, step: int) -> None:
        """Starts the trace before the first of its steps."""
        if step in self.steps and not self._is_tracing:
            jax.profiler.start_trace(self.folder)
            self._is_tracing = True

    def ends(self, step: int) -> bool:
        """Whether the trace ends after this step, for which the caller then waits."""
        return self._is_tracing and step >= self.steps[-1]

    def end(self) -> None:
        """Writes the trace, if there is one."""
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()
            self.is_written = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Ends the trace. After an error of the block, a trace that cannot be written does not take its place."""
        try:
            self.end()
        except Exception as error:
            if kind is None:
                raise
            logging.warning("The trace in %s is not written: %s", self.folder, error)


NO_TRACE = StepTrace(Path(), range(0))
