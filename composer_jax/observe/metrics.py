"""Metric files: append-only JSON lines that survive a kill and can be truncated to an earlier step.

A row is {"step": int, "time": float, ...numbers}; `time` is seconds since the start of the run without the pause
between a kill and the resumption. A number that is not finite is written as null, because JSON has no NaN.
"""

import json
import math
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from composer_jax.atomic_write import write_atomically
from composer_jax.errors import UserError
from composer_jax.observe.sinks import Sink


class MetricsWriter:
    """Appends rows to a metrics file and flushes each; a context manager.

    before_write: called before every row, such as Workdir.require_held: a run that lost its folder ends at the next
      step.
    sinks: get the same rows, and are closed with the writer.

    Opening an existing file continues it: an incomplete last line (the run was killed while writing) is dropped, and
    the clock continues from the last row. A run that resumes from an older checkpoint calls `truncate_after` first.
    """

    def __init__(self, path: Path, before_write: Callable[[], None] | None = None, sinks: Sequence[Sink] = ()):
        self.path, self._before_write, self._sinks = Path(path), before_write, sinks
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder {self.path.parent}: {error.strerror}") from error
        rows = read_metrics(self.path)
        self._reopen(rows, rewrite=not _ends_with_newline(self.path))
        for sink in sinks:
            sink.truncate_after(self._valid_step - bool(rows))
            if rows:
                sink.write(rows[-1])  # a kill may have lost the copy

    def write(self, step: int, **values: Any) -> None:
        """Appends one row. Values are None, numbers, or anything that `float` accepts (a jax or numpy scalar).

        Raises:
          ValueError: `step` is smaller than the last step, or a value is named "time".
        """
        if step < self._last_step:
            raise ValueError(
                f"step {step} comes after step {self._last_step} in {self.path}; call truncate_after({step - 1}) first"
            )
        if "time" in values:
            raise ValueError('"time" is written by the MetricsWriter; use another name for the value')
        if self._before_write is not None:
            self._before_write()
        seconds = round(time.monotonic() - self._started, 3)
        row = {"step": int(step), "time": seconds, **{name: _number(value) for name, value in values.items()}}
        self._file.write(json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n")
        self._file.flush()
        self._last_step = step
        for sink in self._sinks:
            sink.write(row)

    def truncate_after(self, step: int) -> None:
        """Drops the rows of steps after `step` by an atomic rewrite."""
        self._file.close()
        self._reopen([row for row in read_metrics(self.path) if row["step"] <= step], rewrite=True)
        for sink in self._sinks:
            sink.truncate_after(self._valid_step)

    def close(self) -> None:
        self._file.close()
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

    def _reopen(self, rows: list[dict[str, Any]], *, rewrite: bool) -> None:
        if rewrite:
            lines = (json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
            write_atomically(self.path, "".join(lines).encode())
        self._last_step = rows[-1]["step"] if rows else -math.inf
        self._started = time.monotonic() - (rows[-1].get("time") or 0.0 if rows else 0.0)
        try:
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from error


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

    Raises:
      UserError: a line before the last one is not a metrics row. A kill damages only the last line.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    # A row ends with a newline, so text after the last newline is incomplete even if it parses.
    rows = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if not isinstance(row, Mapping) or not isinstance(row.get("step"), int):
            raise UserError(f"line {number} of {path} is not a metrics row; move the file away to start a new one")
        rows.append(dict(row))
    return rows


def _ends_with_newline(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return True
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def _number(value: Any) -> int | float | None:
    if isinstance(value, numbers.Integral):
        return int(value)
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None
