"""Progress with rate and remaining time: a live bar in a terminal, a line every ten seconds in a log file."""

import io
import os
import sys
import time
import warnings
from collections import deque
from typing import Any, Self, TextIO

import tqdm

LINE_EVERY_S = 10.0
RATE_WINDOW_S = 60.0  # the rate in a log line is that of the last minute, which soon excludes compilation
SCALE_FROM = 100_000  # totals from here on are shown as 412k/800k

_hidden = False


def hide_progress(hidden: bool = True) -> None:
    """Hides progress in this process from now on, or shows it again; process 0 of several shows it."""
    global _hidden
    _hidden = hidden


class Progress:
    """A context manager that shows the progress of a loop.

    A terminal and a notebook show a tqdm bar. Any other stream (a log file, a pipe) gets a line about every 10 s with
    done/total, rate, remaining time and metrics, and a line at the end.

    Args:
      total: units of the whole loop.
      unit: name of a unit in the plural: "steps", "episodes", "files".
      description: the stage, in a word or two.
      stream: output; None is sys.stderr at the time of entering, or nothing after `hide_progress`.
      initial: units done by an earlier run; they are excluded from the rate.
    """

    def __init__(self, total: int, unit: str, description: str, stream: TextIO | None = None, *, initial: int = 0):
        self.total, self.unit, self.description = total, unit, description
        self.done = self._initial = initial
        self._stream = stream
        self._shown: dict[str, Any] = {}
        self._bar: tqdm.tqdm | None = None

    def __enter__(self) -> Self:
        self._stream = self._stream or (io.StringIO() if _hidden else sys.stderr)
        self._started = self._last_line = time.monotonic()
        self._marks: deque[tuple[float, int]] = deque([(self._started, self.done)])
        if self._stream.isatty() or (self._stream is sys.stderr and _in_notebook()):
            self._bar = _make_bar(self.total, self.unit, self.description, self._stream, self._initial)
        return self

    def update(self, n: int = 1, **shown_metrics: Any) -> None:
        """Counts `n` more units as done and shows these metrics, each until its next value."""
        self.done += n
        self._shown.update(shown_metrics)
        if self._bar is not None:
            self._bar.set_postfix_str(_format_metrics(self._shown), refresh=False)
            self._bar.update(n)
            return
        now = time.monotonic()
        self._marks.append((now, self.done))
        while len(self._marks) > 2 and now - self._marks[1][0] >= RATE_WINDOW_S:
            self._marks.popleft()
        if now - self._last_line >= LINE_EVERY_S and self.done < self.total:
            self._last_line = now
            rate = _rate(self._marks[0], self._marks[-1])
            left = tqdm.tqdm.format_interval((self.total - self.done) / rate) if rate else "?"
            percent = 100 * self.done / max(self.total, 1)
            self._line(f"{self._count()} ({percent:.0f}%), {format_rate(rate, self.unit)}, ETA {left}")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
            return
        now = time.monotonic()
        took = tqdm.tqdm.format_interval(now - self._started)
        if kind is None:
            rate = _rate((self._started, self._initial), (now, self.done))
            self._line(f"{self._count()} in {took}, {format_rate(rate, self.unit)}")
        else:
            self._line(f"stopped at {self._count()} after {took}")

    def _count(self) -> str:
        return f"{_amount(self.done, self.total)}/{_amount(self.total, self.total)} {self.unit}"

    def _line(self, text: str) -> None:
        metrics = _format_metrics(self._shown)
        print(f"{self.description}: {text}{', ' + metrics if metrics else ''}", file=self._stream, flush=True)


def format_rate(rate: float | None, unit: str) -> str:
    """Formats units per second: "3.21 steps/s", "8,412 tokens/s", "4.5 s each" for a slow rate."""
    if not rate:
        return f"? {unit}/s"
    if rate < 1:
        return f"{1 / rate:.3g} s each"
    return f"{rate:,.0f} {unit}/s" if rate >= 100 else f"{rate:.3g} {unit}/s"


def _rate(earlier: tuple[float, int], later: tuple[float, int]) -> float | None:
    seconds, units = later[0] - earlier[0], later[1] - earlier[1]
    return units / seconds if seconds > 0 and units > 0 else None


def _amount(value: int, total: int) -> str:
    return tqdm.tqdm.format_sizeof(value) if total >= SCALE_FROM else str(value)


def _format_metrics(metrics: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        if value is None or isinstance(value, str):
            return value or "?"
        return f"{value:,}" if isinstance(value, int) else f"{float(value):.4g}"

    return ", ".join(f"{name} {text(value)}" for name, value in metrics.items())


def _make_bar(total: int, unit: str, description: str, stream: TextIO, initial: int) -> tqdm.tqdm:
    with warnings.catch_warnings():
        # Without ipywidgets the notebook bar falls back to text, which suffices, and warns.
        warnings.simplefilter("ignore", tqdm.TqdmWarning)
        from tqdm import auto

        class Bar(auto.tqdm):
            @property
            def format_dict(self) -> dict[str, Any]:
                fields = super().format_dict
                rate = fields["rate"]
                if rate is None and fields["elapsed"]:
                    rate = (fields["n"] - initial) / fields["elapsed"]
                return {**fields, "format_rate": format_rate(rate, unit)}

        # A terminal of unknown size (as in some containers) reports 0 columns, for which tqdm draws nothing.
        size: dict[str, Any] = {"dynamic_ncols": True} if _has_terminal_size(stream) else {"ncols": 100, "nrows": 24}
        return Bar(
            total=total,
            desc=description,
            file=stream,
            initial=initial,
            **size,
            smoothing=0.1,
            unit_scale=total >= SCALE_FROM,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} "
            + unit
            + " [{elapsed}<{remaining}, {format_rate}{postfix}]",
        )


def _has_terminal_size(stream: TextIO) -> bool:
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError):  # no file descriptor, or not one of a terminal
        return True


def _in_notebook() -> bool:
    """Whether this is a Jupyter or Colab kernel, whose stderr is shown to the user although it is not a terminal."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and "IPKernelApp" in shell.config
