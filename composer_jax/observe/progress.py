"""Progress with rate and time left: a live bar on a screen, a line every ten seconds in a log file."""

import io
import os
import sys
import time
import warnings
from collections import deque
from typing import Any, Self, TextIO

import tqdm

LINE_EVERY_S = 10.0
RATE_WINDOW_S = 60.0  # the rate in a log line is that of the last minute, so that compiling is soon forgotten
SCALE_FROM = 100_000  # totals this long are shown as 412k/800k

_hidden = False


def hide_progress() -> None:
    """Shows none in this process from now on: of several processes that do the same, one shows it."""
    global _hidden
    _hidden = True


class Progress:
    """A context manager that shows how far a loop is.

    In a terminal and in a notebook it is a tqdm bar; where the stream is neither (a log file, a pipe) it is
    one line about every 10 s with done/total, rate, time left and metrics, and one line at the end.

    Args:
      total: how many units the loop has in all.
      unit: what is counted, in the plural: "steps", "episodes", "files".
      description: the stage, a word or two.
      stream: where to write; None is sys.stderr at the time of entering, or nowhere after `hide_progress`.
      initial: units done by an earlier run; they count as done, not towards the rate.
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
        """Counts `n` more units as done and shows these metrics (kept until given anew) beside the count."""
        self.done += n
        self._shown.update(shown_metrics)
        if self._bar is not None:
            self._bar.set_postfix_str(_metric_words(self._shown), refresh=False)
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
            self._line(f"{self._count()} ({percent:.0f}%), {rate_words(rate, self.unit)}, ETA {left}")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
            return
        now = time.monotonic()
        took = tqdm.tqdm.format_interval(now - self._started)
        if kind is None:
            rate = _rate((self._started, self._initial), (now, self.done))
            self._line(f"{self._count()} in {took}, {rate_words(rate, self.unit)}")
        else:
            self._line(f"stopped at {self._count()} after {took}")

    def _count(self) -> str:
        return f"{_amount(self.done, self.total)}/{_amount(self.total, self.total)} {self.unit}"

    def _line(self, text: str) -> None:
        metrics = _metric_words(self._shown)
        print(f"{self.description}: {text}{', ' + metrics if metrics else ''}", file=self._stream, flush=True)


def rate_words(rate: float | None, unit: str) -> str:
    """A rate (units per second) for people: "3.21 steps/s", "8,412 tokens/s", "4.5 s each" when slow."""
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


def _metric_words(metrics: dict[str, Any]) -> str:
    def words(value: Any) -> str:
        if value is None or isinstance(value, str):
            return value or "?"
        return f"{value:,}" if isinstance(value, int) else f"{float(value):.4g}"

    return ", ".join(f"{name} {words(value)}" for name, value in metrics.items())


def _make_bar(total: int, unit: str, description: str, stream: TextIO, initial: int) -> tqdm.tqdm:
    with warnings.catch_warnings():
        # Without ipywidgets the notebook bar falls back to text, which is fine, and warns, which is not.
        warnings.simplefilter("ignore", tqdm.TqdmWarning)
        from tqdm import auto

        class Bar(auto.tqdm):
            @property
            def format_dict(self) -> dict[str, Any]:
                fields = super().format_dict
                rate = fields["rate"]
                if rate is None and fields["elapsed"]:
                    rate = (fields["n"] - initial) / fields["elapsed"]
                return {**fields, "rate_words": rate_words(rate, unit)}

        # A terminal of unknown size (in a container, say) has 0 columns and lines: tqdm would draw nothing.
        size = {"dynamic_ncols": True} if _knows_its_size(stream) else {"ncols": 100, "nrows": 24}
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
            + " [{elapsed}<{remaining}, {rate_words}{postfix}]",
        )


def _knows_its_size(stream: TextIO) -> bool:
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError):  # no file descriptor, or not one of a terminal
        return True


def _in_notebook() -> bool:
    """Whether this is a Jupyter or Colab kernel: its stderr is no terminal, and yet a person reads it."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and "IPKernelApp" in shell.config
