"""What is remembered of tracked sessions between two commands, in files that only their owner can read.

The folder (WorkingTree.folder) holds sessions/HASH.json, the texts of files that a session changed among them, and
timeline.json, the snapshots of all sessions. It is deleted with the last session.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from composer_jax.atomic_write import write_atomically
from composer_jax.errors import UserError
from composer_jax.realtime.track.agent_diff import Author, FileDiff
from composer_jax.realtime.track.event_sender import QueuedEvent

SCHEMA = 1
MAX_QUEUED = 1000
"""Events of one session that wait to be sent."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The working tree at one moment in the life of a session."""

    time: float
    tree: str
    key: str
    """TrackedSession.key."""
    kind: Literal["start", "mark", "stop"]


@dataclasses.dataclass
class TrackedSession:
    """A session in this working tree."""

    session: str
    server: str
    api_key: str
    turn: str = ""
    """Which answer the events are about; "" for the whole session."""
    key: str = dataclasses.field(default_factory=lambda: secrets.token_hex(16))
    """Random; names the session in the timeline, and salts the hashes of its hunks."""
    latest: float = 0.0
    """Unix seconds of the last look at the clock."""
    stopped: float | None = None
    """Unix seconds at which the agent last stopped; None while it works."""
    tree: str = ""
    """Snapshot when the agent stopped."""
    files: list[FileDiff] = dataclasses.field(default_factory=list)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    """Changed files that are not measured, with the reason."""
    branches: list[str] = dataclasses.field(default_factory=list)
    """WorkingTree.branch() wherever the session's changes were seen."""
    old_stashes: list[str] = dataclasses.field(default_factory=list)
    """Stashes that are older than the session's changes."""
    renames: dict[str, str] = dataclasses.field(default_factory=dict)
    """Path after the session -> where the file was renamed to since."""
    measured: list[float] = dataclasses.field(default_factory=list)
    """Horizons that are done."""
    head: str | None = None
    """The commit that was last looked at."""
    committed: int = 0
    """Most lines of the session's changes in any commit so far."""
    undone: bool = False
    queue: list[QueuedEvent] = dataclasses.field(default_factory=list)
    dropped: int = 0
    """Events beyond MAX_QUEUED, or too old to be sent."""

    def add(self, event: QueuedEvent) -> None:
        """Queues an event, unless one of its id waits already."""
        if any(queued.id == event.id for queued in self.queue):
            return
        if len(self.queue) < MAX_QUEUED:
            self.queue.append(event)
        else:
            self.dropped += 1


class SessionStore:
    """Tracked sessions and their timeline in a folder. What is written depends on what was read inside one `lock()`."""

    def __init__(self, folder: Path):
        self.folder = folder

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps other processes from reading and writing; waits for one that does."""
        with self._locked("lock", fcntl.LOCK_EX):
            yield

    @contextlib.contextmanager
    def follow(self, session: str) -> Iterator[None]:
        """Keeps other processes from following a session. Raises UserError if one does."""
        name = f"{_file_name(session)}.follow"
        try:
            with self._locked(name, fcntl.LOCK_EX | fcntl.LOCK_NB):
                (self.folder / name).write_text(str(os.getpid()))
                yield
        except BlockingIOError:
            raise UserError(
                f"session {session!r} is already followed by process {self._holder(name)}; end that one first"
            ) from None

    def load(self, session: str) -> TrackedSession | None:
        """Returns a session, or None. Raises UserError for a file that another version wrote."""
        file = self._file(session)
        return _read_session(file) if file.exists() else None

    def load_all(self) -> list[TrackedSession]:
        """Returns all sessions, by when they were last looked at."""
        files = sorted((self.folder / "sessions").glob("*.json"))
        return sorted((_read_session(file) for file in files), key=lambda session: session.latest)

    def save(self, session: TrackedSession) -> None:
        """Writes a session."""
        content = {"schema": SCHEMA, **dataclasses.asdict(session)}
        self._write(self._file(session.session), content)

    def delete(self, session: str) -> None:
        """Forgets a session, and with the last one everything but the lock; without `sessions`, hooks do nothing."""
        self._file(session).unlink(missing_ok=True)
        if not self.load_all():
            for path in self.folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != "lock":
                    path.unlink(missing_ok=True)

    def timeline(self) -> list[Snapshot]:
        """Returns the snapshots of all sessions, the oldest first."""
        file = self.folder / "timeline.json"
        return [Snapshot(**entry) for entry in json.loads(file.read_bytes())] if file.exists() else []

    def add_snapshot(self, snapshot: Snapshot) -> None:
        """Adds the newest snapshot."""
        timeline = [*self.timeline(), snapshot]
        self._write(self.folder / "timeline.json", [dataclasses.asdict(entry) for entry in timeline])

    def _file(self, session: str) -> Path:
        return self.folder / "sessions" / f"{_file_name(session)}.json"

    def _write(self, file: Path, content: Any) -> None:
        self._make_folder()
        write_atomically(file, json.dumps(content).encode())

    def _make_folder(self) -> None:
        try:
            (self.folder / "sessions").mkdir(parents=True, exist_ok=True)
            self.folder.chmod(0o700)
        except OSError as error:
            raise UserError(
                f"cannot write {self.folder} ({error.strerror}); the tracker keeps its state there, so let it"
            ) from error

    @contextlib.contextmanager
    def _locked(self, name: str, how: int) -> Iterator[None]:
        if not self.folder.exists():
            self._make_folder()
        with (self.folder / name).open("a+") as file:
            fcntl.flock(file, how)
            yield

    def _holder(self, name: str) -> str:
        return (self.folder / name).read_text() or "(unknown)"


def start_time(timeline: Sequence[Snapshot], key: str) -> float:
    """Returns the Unix seconds at which a session first started."""
    return next(snapshot.time for snapshot in timeline if snapshot.key == key)


def authors_after(timeline: Sequence[Snapshot], key: str) -> list[Author]:
    """Returns for each snapshot who made the changes between it and the next one, as the session of this key sees it.

    What a session marks is its own: the changes since the snapshot before the mark, whoever else is at work.
    """
    active: set[str] = set()
    authors: list[Author] = []
    for snapshot, following in zip(timeline, [*timeline[1:], None], strict=True):
        active = active - {snapshot.key} if snapshot.kind == "stop" else active | {snapshot.key}
        if following is not None and following.kind == "mark":
            authors.append("session" if following.key == key else "other")
        elif key not in active:
            authors.append("other" if active else "nobody")
        else:
            authors.append("session" if active == {key} else "unclear")
    return authors


def _file_name(session: str) -> str:
    return hashlib.sha256(session.encode(errors="surrogateescape")).hexdigest()[:32]


def _read_session(file: Path) -> TrackedSession:
    content = json.loads(file.read_bytes())
    if content.pop("schema", None) != SCHEMA:
        raise UserError(f"{file} was written by another version of the tracker; delete it to track the session anew")
    for entry in content["files"]:
        entry.update({name: tuple(entry[name]) for name in ("added", "deleted", "foreign")})
    content["files"] = [FileDiff(**entry) for entry in content["files"]]
    content["queue"] = [QueuedEvent(**entry) for entry in content["queue"]]
    return TrackedSession(**content)
