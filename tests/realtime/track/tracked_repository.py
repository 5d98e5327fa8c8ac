"""A git repository of a user, a clock that tests set, and a tracker of it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_jax.realtime.track.event_sender import QueuedEvent
from composer_jax.realtime.track.tracker import Tracker

NOWHERE = "http://127.0.0.1:9"
"""Nothing listens there: events stay in the queue, where tests read them."""
SETTINGS = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    **{f"GIT_{who}_{what}": "somebody@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}

SOURCE = """import os


def first(values):
    total = 0
    for value in values:
        total += value
    return total


def second(name, default=None):
    if name in os.environ:
        return os.environ[name]
    return default
"""
AGENT = """import os


def first(values):
    return sum(value for value in values if value is not None)


def second(name, default=None):
    if name in os.environ:
        return os.environ[name]
    return default


def third(name, width, fill):
    text = second(name, default="nothing")
    return text.rjust(width, fill)
"""
"""SOURCE after an agent: 4 lines added and 4 deleted, 5 others."""


class TrackedRepository:
    """A repository with one commit of SOURCE as main.py, and a tracker whose clock is `now`."""

    def __init__(self, root: Path):
        self.root, self.now = root, 1000.0
        self.reports: list[str] = []
        root.mkdir()
        self.git("init", "-q", "-b", "main")
        self.write("main.py", SOURCE)
        self.commit("first")
        self.tracker = self.new_tracker()

    def new_tracker(self) -> Tracker:
        """A tracker as another process would make one."""
        return Tracker(self.root, clock=lambda: self.now, report=self.reports.append)

    def git(self, *arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", self.root, *arguments],
            env={**os.environ, **SETTINGS},
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=False,
        )
        assert done.returncode == 0 or "CONFLICT" in done.stdout + done.stderr, done
        return done.stdout

    def commit(self, message: str) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)

    def write(self, path: str, text: str | bytes) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_bytes(text if isinstance(text, bytes) else text.encode())

    def read(self, path: str = "main.py") -> str:
        return (self.root / path).read_text()

    def replace(self, old: str, new: str, path: str = "main.py") -> None:
        assert old in self.read(path)
        self.write(path, self.read(path).replace(old, new))

    def session(self, files: Mapping[str, str | bytes] | None = None, name: str = "s") -> None:
        """A session of an agent that writes these files: AGENT as main.py unless others are given."""
        self.tracker.start(name, NOWHERE)
        for path, text in ({"main.py": AGENT} if files is None else files).items():
            self.write(path, text)
        self.tracker.stop(name)

    def queue(self, name: str = "s") -> list[QueuedEvent]:
        session = self.tracker.store.load(name)
        assert session is not None
        return session.queue

    def events(self, kind: str, name: str = "s") -> list[Mapping[str, Any]]:
        return [event.payload for event in self.queue(name) if event.kind == kind]

    def edited(self, horizon: float = 600, name: str = "s") -> dict[str, Any]:
        """What is measured at this age, without the horizon and zeros."""
        session = self.tracker.store.load(name)
        assert session is not None and session.stopped is not None
        self.now = session.stopped + horizon
        self.tracker.check(name)
        payload = next(event for event in self.events("edited_after", name) if event["horizon"] == horizon)
        return {field: value for field, value in payload.items() if value and field != "horizon"}
