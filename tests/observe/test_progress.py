import io
import os
import pty
import select
import sys
from types import SimpleNamespace

import pytest

from composer_jax.observe import progress
from composer_jax.observe.progress import Progress, format_rate


class Clock:
    """A clock that advances only when the test sets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 1000.0
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: self.now))


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_log_file_gets_a_line_every_ten_seconds_and_one_at_the_end(monkeypatch):
    clock, log = Clock(monkeypatch), io.StringIO()
    with Progress(100, "steps", "pretrain", log) as bar:
        for step in range(100):
            clock.now += 0.5
            bar.update(1, loss=4.0 - step / 100, tokens=step * 3072)
    lines = log.getvalue().splitlines()
    assert "\r" not in log.getvalue()
    assert lines[0] == "pretrain: 20/100 steps (20%), 2 steps/s, ETA 00:40, loss 3.81, tokens 58,368"
    assert len(lines) == 5
    assert lines[-1] == "pretrain: 100/100 steps in 00:50, 2 steps/s, loss 3.01, tokens 304,128"


def test_hidden_progress_counts_and_shows_nothing(capsys):
    try:
        for hidden in (True, False):
            progress.hide_progress(hidden)
            with Progress(2, "steps", "pretrain") as bar:
                bar.update(2)
            assert bar.done == 2 and ("2/2 steps" in capsys.readouterr().err) is not hidden
    finally:
        progress.hide_progress(False)


def test_the_rate_forgets_a_slow_start(monkeypatch):
    clock, log = Clock(monkeypatch), io.StringIO()
    with Progress(1000, "steps", "rl", log) as bar:
        clock.now += 300  # compiling
        bar.update()
        for _ in range(200):
            clock.now += 1
            bar.update()
    assert log.getvalue().splitlines()[-2] == "rl: 201/1000 steps (20%), 1 steps/s, ETA 13:19"


def test_steps_of_an_earlier_run_count_as_done_but_not_towards_the_rate(monkeypatch):
    clock, log = Clock(monkeypatch), io.StringIO()
    with Progress(100, "steps", "sft", log, initial=90) as bar:
        clock.now += 20
        bar.update(5)
        clock.now += 20
        bar.update(5)
    lines = log.getvalue().splitlines()
    assert lines[0] == "sft: 95/100 steps (95%), 4 s each, ETA 00:20"
    assert lines[1] == "sft: 100/100 steps in 00:40, 4 s each"


def test_an_interrupted_loop_prints_its_progress(monkeypatch):
    clock, log = Clock(monkeypatch), io.StringIO()
    with pytest.raises(KeyboardInterrupt), Progress(10, "tasks", "evaluate", log) as bar:
        clock.now += 3
        bar.update(4, passed=None)
        raise KeyboardInterrupt
    assert log.getvalue() == "evaluate: stopped at 4/10 tasks after 00:03, passed ?\n"


def test_long_totals_are_scaled(monkeypatch):
    Clock(monkeypatch)
    log = io.StringIO()
    with Progress(800_000, "tokens", "pretrain", log) as bar:
        bar.update(412_000)
    assert "412k/800k tokens" in log.getvalue()


def test_a_terminal_gets_a_live_bar_with_rate_remaining_time_and_metrics():
    screen = Screen()
    with Progress(50, "episodes", "rl", screen) as bar:
        for _ in range(50):
            bar.update(1, reward=0.5)
    shown = screen.getvalue()
    assert "\r" in shown
    last = shown.rsplit("\r", 1)[-1]
    assert last.startswith("rl: 100%|")
    assert "50/50 episodes [" in last and "episodes/s, reward 0.5]" in last


def test_a_terminal_of_unknown_size_gets_a_bar_too(monkeypatch):
    ours, theirs = pty.openpty()  # a fresh one has 0 columns and lines
    with os.fdopen(theirs, "w") as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        with Progress(2, "steps", "rl") as bar:
            bar.update(2)
        seen = b""
        while b"2/2 steps" not in seen and select.select([ours], [], [], 10)[0]:  # it arrives in pieces
            seen += os.read(ours, 65536)
    assert b"2/2 steps" in seen
    os.close(ours)


def test_stderr_is_the_default_stream(capsys):
    with Progress(1, "files", "encode") as bar:
        bar.update()
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("encode: 1/1 files")


@pytest.mark.parametrize(
    ("rate", "text"),
    [(None, "? steps/s"), (0.25, "4 s each"), (3.216, "3.22 steps/s"), (8412.4, "8,412 steps/s")],
)
def test_format_rate(rate, text):
    assert format_rate(rate, "steps") == text
