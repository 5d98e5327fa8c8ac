"""Metric files: append-only JSON lines that survive a kill and can be truncated to an earlier step.

A row is {"step": int, "time": float, ...numbers}; `time` is seconds since the start of the run without the pause
between a kill and the resumption. A number that is not finite is written as null, because JSON has no NaN.
"""

import math
import numbers
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from composer_jax.errors import UserError
from composer_jax.observe.journal import Journal, read_journal
from composer_jax.observe.sinks import Sink


class MetricsWriter:
    """Appends rows to a metrics file and flushes each; a context manager.

    before_write: called before every write, such as Workdir.require_held: a run that lost its folder ends at the next
      step.
    sinks: get the same rows, and are closed with the writer.

    Opening an existing file continues it: an incomplete last line (the run was killed while writing) is dropped, and
    the clock continues from the last row. A run that resumes from an older checkpoint calls `truncate_after` first.
    """

    def __init__(self, path: Path, before_write: Callable[[], None] | None = None, sinks: Sequence[Sink] = ()):
        self.path, self._sinks = Path(path), sinks
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder {self.path.parent}: {error.strerror}") from error
        rows = read_metrics(self.path)
        self._journal = Journal(self.path, before_write, sync=False)
        self._follow(rows)
        for sink in sinks:
            sink.truncate_after(self._valid_step - bool(rows))
            if rows:
                sink.write(rows[-1])  # a kill may have lost the copy

    def write(self, step: int, **values: Any) -> None:
        """Appends one row. Values are None, numbers, or anything that `float` accepts (a jax or numpy scalar).

        Raises ValueError if `step` is smaller than the last step, or a value is named "time".
        """
        if step < self._last_step:
            raise ValueError(
                f"step {step} comes after step {self._last_step} in {self.path}; call truncate_after({step - 1}) first"
            )
        if "time" in values:
            raise ValueError('"time" is written by the MetricsWriter; use another name for the value')
        seconds = round(time.monotonic() - self._started, 3)
        row = {"step": int(step), "time": seconds, **{name: _number(value) for name, value in values.items()}}
        self._journal.append(row)
        self._last_step = step
        for sink in self._sinks:
            sink.write(row)

    def truncate_after(self, step: int) -> None:
        """Drops the rows of steps after `step` by an atomic rewrite."""
        rows = [row for row in read_metrics(self.path) if row["step"] <= step]
        self._journal.rewrite(rows)
        self._follow(rows)
        for sink in self._sinks:
            sink.truncate_after(self._valid_step)

    def close(self) -> None:
        self._journal.close()
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _valid_step(self) -> int:
        """The last step that has a row; -1 if there is none."""
        return int(self._last_step) if math.isfinite(self._last_step) else -1

    def _follow(self, rows: list[dict[str, Any]]) -> None:
        self._last_step = rows[-1]["step"] if rows else -math.inf
        self._started = time.monotonic() - (rows[-1].get("time") or 0.0 if rows else 0.0)


class NoMetrics(MetricsWriter):
    """Ignores all rows: for processes other than process 0, which writes the same rows."""

    def __init__(self) -> None:
        pass

    def write(self, step: int, **values: Any) -> None:
        pass

    def truncate_after(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a metrics file in order without an incomplete last line; [] if there is no such file.

    Raises UserError if a line before the last one is not a metrics row. A kill damages only the last line.
    """
    refusal = "is not a metrics row; move the file away to start a new one"
    rows = read_journal(Path(path), refusal)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get("step"), int):
            raise UserError(f"line {number} of {path} {refusal}")
    return rows


def _number(value: Any) -> int | float | None:
    if isinstance(value, numbers.Integral):
        return int(value)
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None
