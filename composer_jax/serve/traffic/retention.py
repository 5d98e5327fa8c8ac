"""Retention: sessions that are forgotten, dropped or too old leave the folder; what killed processes left, too.

A tombstone is written first, and from then on nobody reads the session. Its turns and rows go afterwards: files are
copied without them, one transaction names the copies and deletes the rows, and then the old files are deleted. So a
process that is killed in between leaves nothing that is read, and the next one finishes the work.
"""

import contextlib
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from composer_jax.atomic_write import open_atomically
from composer_jax.errors import UserError
from composer_jax.serve.traffic import turn_files
from composer_jax.serve.traffic.database import open_database
from composer_jax.serve.traffic.policy import TrafficPolicy, read_policy
from composer_jax.storage.workdir import FolderInUse, lock_folder

FLAG = "--traffic"


def forget(
    folder: Path | str, *, session: str = "", user: str = "", clock: Callable[[], float] = time.time
) -> list[str]:
    """Deletes a session, or all sessions of a user; returns the ids of those that are gone or will be in a moment.

    A second call changes nothing more. While a server writes into the folder, the server deletes, within seconds.

    session: X-Session-ID. user: X-User-ID, or its hash as SessionRecord.user has it.

    Raises UserError unless exactly one of the two is given, and for a folder that is none.
    """
    if bool(session) == bool(user):
        raise UserError(f"session={session!r} and user={user!r} were given; give one of the two.")
    folder = Path(folder)
    users = {read_policy(folder).hash(user)} if user else set()
    users |= {user} if re.fullmatch("[0-9a-f]{32}", user) else set()
    with contextlib.closing(open_database(folder)) as database:
        with database:
            database.execute("BEGIN IMMEDIATE")
            sessions = [session] if session else []
            for name in users:
                rows = database.execute("SELECT session FROM sessions WHERE user = ?", (name,))
                sessions += [row[0] for row in rows]
                database.execute(
                    "INSERT OR REPLACE INTO tombstones VALUES ('user', ?, 'forgotten', ?, 1)", (name, clock())
                )
            bury(database, sessions, "forgotten", clock())
        try:
            lock = lock_folder(folder, f"{os.getpid()} forgets", FLAG)
        except FolderInUse:
            return sessions
        try:
            recover(folder, database)
        finally:
            os.close(lock)
    return sessions


def bury(database: sqlite3.Connection, sessions: Collection[str], reason: str, now: float) -> None:
    """Writes tombstones of sessions, inside the caller's transaction; an older one keeps its reason."""
    database.executemany(
        "INSERT INTO tombstones VALUES ('session', ?, ?, ?, 0) ON CONFLICT DO UPDATE SET erased = 0",
        [(session, reason, now) for session in sessions],
    )


def recover(folder: Path, database: sqlite3.Connection) -> None:
    """Deletes what killed processes left, and the sessions that have tombstones. The caller holds the folder's lock."""
    erase(folder, database, {row[0] for row in database.execute(WAITING)})
    ends = dict(database.execute("SELECT file, max(start + size) FROM turns GROUP BY file"))
    for path in sorted((folder / turn_files.FOLDER).glob("*/*")):
        match = re.fullmatch(r"(\d+)\.jsonl\.zst", path.name)
        end = ends.get(f"{path.parent.name}/{match[1]}") if match else None
        if end is None:
            path.unlink()
        elif path.stat().st_size > end:
            os.truncate(path, end)
    for path in (folder / turn_files.FOLDER).glob("*"):
        if not any(path.iterdir()):
            path.rmdir()


WAITING = "SELECT name FROM tombstones WHERE kind = 'session' AND erased = 0"
"""Sessions whose turns are still to be deleted."""


def expire(folder: Path, database: sqlite3.Connection, policy: TrafficPolicy, now: float) -> int:
    """Deletes the sessions that opened over `policy.retention_days` days ago; returns their number.

    The caller holds the folder's lock. now: Unix seconds.
    """
    first_day = day_of(now - timedelta(days=policy.retention_days).total_seconds())
    old = "SELECT session FROM sessions WHERE day < ?"
    with database:
        database.execute("BEGIN IMMEDIATE")
        sessions = {row[0] for row in database.execute(old, (first_day,))}
        _delete_rows(database, sessions)
    for path in (folder / turn_files.FOLDER).glob("*"):
        if path.name < first_day:
            shutil.rmtree(path)
    _overwrite_log(database)
    return len(sessions)


def day_of(time: float) -> str:
    """Returns the day of a time as YYYY-MM-DD, in UTC. time: Unix seconds."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d")


def erase(folder: Path, database: sqlite3.Connection, sessions: Collection[str]) -> None:
    """Deletes the turns and rows of sessions that have tombstones. The caller holds the folder's lock."""
    if not sessions:
        return
    find = "SELECT DISTINCT file FROM turns WHERE session = ?"
    files = {row[0] for session in sessions for row in database.execute(find, (session,))}
    copies = {name: list(_copy_without(folder, database, name, sessions)) for name in sorted(files)}
    with database:
        database.execute("BEGIN IMMEDIATE")
        for name, frames in copies.items():
            database.executemany("UPDATE turns SET file = ?, start = ?, size = ? WHERE file = ? AND start = ?", frames)
            database.execute("DELETE FROM turns WHERE file = ?", (name,))
        _delete_rows(database, sessions)
        done = "UPDATE tombstones SET erased = 1 WHERE kind = 'session' AND name = ?"
        database.executemany(done, [(session,) for session in sessions])
    for name in files:
        turn_files.path_of(folder, name).unlink(missing_ok=True)
    _overwrite_log(database)


def _copy_without(
    folder: Path, database: sqlite3.Connection, name: str, sessions: Collection[str]
) -> Iterator[tuple[str, int, int, str, int]]:
    """Copies a file without the turns of some sessions; yields (copy, start, size, file, its start) of each frame."""
    rows = database.execute("SELECT start, size, session FROM turns WHERE file = ? ORDER BY start", (name,)).fetchall()
    concerned = {start for start, _, session in rows if session in sessions}
    copy, end = next_file(folder, name.partition("/")[0]), 0
    if all(session in sessions for *_, session in rows):
        return
    with open_atomically(turn_files.path_of(folder, copy)) as target:
        for start, size in sorted({row[:2] for row in rows}):
            frame = turn_files.read_frame(folder, name, start, size)
            if start in concerned:
                turns = turn_files.unpack(frame, f"{name} at byte {start}")
                others = [turn for turn in turns if turn.session not in sessions]
                frame = turn_files.pack(others) if others else b""
            if frame:
                target.write(frame)
                yield copy, end, len(frame), name, start
                end += len(frame)


def next_file(folder: Path, day: str) -> str:
    """Returns the name of the next file of a day, after those that exist."""
    names = (path.name.partition(".")[0] for path in (folder / turn_files.FOLDER / day).glob("*.jsonl.zst"))
    return f"{day}/{max((int(name) for name in names if name.isdigit()), default=-1) + 1:03d}"


def _delete_rows(database: sqlite3.Connection, sessions: Collection[str]) -> None:
    """Deletes the rows of sessions from every table that has a column `session`, such as that of labels."""
    tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in tables:
        if "session" in {row[1] for row in database.execute(f'PRAGMA table_info("{table}")')}:
            database.executemany(f'DELETE FROM "{table}" WHERE session = ?', [(session,) for session in sessions])


def _overwrite_log(database: sqlite3.Connection) -> None:
    """Moves the write-ahead log, which still has deleted rows, into the database; a reader may put it off."""
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
