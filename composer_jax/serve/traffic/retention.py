"""Retention: sessions that are forgotten, dropped or too old leave the folder, and so does what killed processes left.

A tombstone is written first, and from then on nobody reads the session. Its turns and rows go afterwards: each file is
copied without them, one transaction names the copy, and then the old file is deleted; the rows go last. A process that
is killed in between leaves nothing that is read, and the next one finishes the work.
"""

import contextlib
import itertools
import os
import re
import sqlite3
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime, timedelta
from pathlib import Path

from absl import logging

from composer_jax.atomic_write import open_atomically
from composer_jax.errors import UserError
from composer_jax.serve.traffic import turn_files
from composer_jax.serve.traffic.database import NAME, open_database
from composer_jax.serve.traffic.policy import TrafficPolicy, read_policy
from composer_jax.storage.workdir import FolderInUse, lock_folder

FLAG = "--traffic"


def forget(
    folder: Path | str, *, session: str = "", user: str = "", clock: Callable[[], float] = time.time
) -> list[str]:
    """Deletes a session, or all sessions of a user; returns the ids of those that are gone or will be in a moment.

    A second call changes nothing more. While a server writes into the folder, the server deletes, within seconds.

    session: X-Session-ID. user: X-User-ID, or its hash as SessionRecord.user has it.

    Raises UserError unless exactly one of the two is given, for a folder that no server wrote or that has links, and
    if the database cannot be written.
    """
    if bool(session) == bool(user):
        raise UserError(f"session={session!r} and user={user!r} were given; give one of the two.")
    folder = Path(folder)
    policy = read_policy(folder)
    users = {policy.hash(f"{kind} {user}") for kind in ("user", "key")} if user else set()
    users |= {user} if re.fullmatch("[0-9a-f]{32}", user) else set()
    try:
        check_folder(folder)
        with contextlib.closing(open_database(folder)) as database:
            sessions = _forget(database, session, users, clock())
            _erase_unless_locked(folder, database, clock)
            return sessions
    except (sqlite3.Error, OSError) as error:
        raise UserError(f"{folder} cannot be written ({error}); call this again later.") from error


def _forget(database: sqlite3.Connection, session: str, users: Collection[str], now: float) -> list[str]:
    """Adds tombstones of a session, and of users with all their sessions; returns the sessions."""
    sessions = [session] if session else []
    with database:
        database.execute("BEGIN IMMEDIATE")
        for name in users:
            sessions += [row[0] for row in database.execute("SELECT session FROM sessions WHERE user = ?", (name,))]
            database.execute("INSERT OR REPLACE INTO tombstones VALUES ('user', ?, 'forgotten', ?, 1)", (name, now))
        add_tombstones(database, sessions, "forgotten", now)
    return sessions


def _erase_unless_locked(folder: Path, database: sqlite3.Connection, clock: Callable[[], float]) -> None:
    """Erases what has tombstones, unless a process that holds the folder's lock will.

    Whoever held the lock looks again after its release: another process may have added a tombstone and met the lock.
    """
    while True:
        try:
            lock = lock_folder(folder, f"{os.getpid()} forgets", FLAG)
        except FolderInUse:
            return
        try:
            recover(folder, database, clock())
        finally:
            os.close(lock)
        if database.execute(TO_ERASE).fetchone() is None:
            return


def check_folder(folder: Path) -> None:
    """Raises UserError for a traffic folder that has links, or turns and no database."""
    if links := [path for path in (folder, *folder.rglob("*")) if path.is_symlink()]:
        raise UserError(f"{links[0]} is a link; traffic is written into its own folder only, so give that one.")
    if not (folder / NAME).exists() and any((folder / turn_files.FOLDER).glob("*/*")):
        raise UserError(f"{folder} has turns and no {NAME}; restore it from a copy, or choose another folder.")


def add_tombstones(database: sqlite3.Connection, sessions: Collection[str], reason: str, now: float) -> None:
    """Writes tombstones of sessions, inside the caller's transaction; an older one keeps its reason."""
    database.executemany(
        "INSERT INTO tombstones VALUES ('session', ?, ?, ?, 0) ON CONFLICT DO UPDATE SET erased = 0",
        [(session, reason, now) for session in sessions],
    )


def recover(folder: Path, database: sqlite3.Connection, now: float) -> None:
    """Deletes what killed processes left, and the sessions that have tombstones. The caller holds the folder's lock."""
    sessions, _ = erase(folder, database, now)
    for day in _days(folder):
        names = set()
        for path in _files(day):
            if path.name.startswith("."):  # temporary
                path.unlink()
            else:
                names.add(f"{day.name}/{path.name.partition('.')[0]}")
        trim(folder, database, names)
        _remove_empty(day)
    if sessions:
        overwrite_log(database)


def trim(folder: Path, database: sqlite3.Connection, names: Collection[str]) -> None:
    """Deletes what lies behind the last frames of files DAY/NNN that rows name, and files that no row names."""
    for name in names:
        path = turn_files.path_of(folder, name)
        end = end_of_file(database, name)
        if end is None:
            path.unlink(missing_ok=True)
        elif path.stat().st_size > end:
            os.truncate(path, end)


def end_of_file(database: sqlite3.Connection, name: str) -> int | None:
    """Returns where the last frame of a file DAY/NNN ends; None if no row names the file."""
    query = "SELECT start + size FROM turns WHERE file = ? ORDER BY start DESC LIMIT 1"
    row = database.execute(query, (name,)).fetchone()
    return None if row is None else row[0]


def _days(folder: Path) -> list[Path]:
    """The folders of days. Links and foreign folders are left alone."""
    turns = folder / turn_files.FOLDER
    paths = [] if turns.is_symlink() else sorted(turns.glob("*"))
    days = (path for path in paths if re.fullmatch(r"\d{4}-\d\d-\d\d", path.name))
    return [path for path in days if path.is_dir() and not path.is_symlink()]


def _files(day: Path) -> list[Path]:
    """The files of turns of a day, and temporary ones. Links and foreign files are left alone."""
    name = re.compile(r"\d{3,}\.jsonl\.zst|\.\d{3,}\.jsonl\.zst\.[0-9a-f]{8}")
    return [path for path in sorted(day.iterdir()) if name.fullmatch(path.name) and not path.is_symlink()]


def _remove_empty(day: Path) -> None:
    if not any(day.iterdir()):
        day.rmdir()


TO_ERASE = "SELECT name FROM tombstones WHERE kind = 'session' AND erased = 0"
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
    for day in _days(folder):
        if day.name < first_day:
            for path in _files(day):
                path.unlink()
            _remove_empty(day)
    return len(sessions)


def day_of(time: float) -> str:
    """Returns the day of a time as YYYY-MM-DD, in UTC. time: Unix seconds."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d")


def erase(folder: Path, database: sqlite3.Connection, now: float) -> tuple[set[str], set[str]]:
    """Deletes the turns and rows of sessions that have tombstones; returns the sessions, and the days of their turns.

    A session with a turn that cannot be read gets a tombstone too. Until `overwrite_log`, the rows are still in the
    write-ahead log. The caller holds the folder's lock.
    """
    erased, days = set[str](), set[str]()
    while sessions := {row[0] for row in database.execute(TO_ERASE)}:
        find = "SELECT DISTINCT file FROM turns WHERE session = ?"
        files = {row[0] for session in sessions for row in database.execute(find, (session,))}
        for name in sorted(files):
            _erase_in_file(folder, database, name, sessions, now)
        with database:
            database.execute("BEGIN IMMEDIATE")
            _delete_rows(database, sessions)
            done = "UPDATE tombstones SET erased = 1 WHERE kind = 'session' AND name = ?"
            database.executemany(done, [(session,) for session in sessions])
        erased |= sessions
        days |= {name.partition("/")[0] for name in files}
    return erased, days


def _erase_in_file(
    folder: Path, database: sqlite3.Connection, name: str, sessions: Collection[str], now: float
) -> None:
    """Replaces a file by a copy without the turns of some sessions, which have tombstones."""
    copy = next_file(folder, name.partition("/")[0])
    try:
        with database:
            database.execute("BEGIN IMMEDIATE")
            frames, broken = _copy_without(folder, database, name, copy, sessions)
            if frames:
                turn_files.sync_names(folder, copy)  # before rows name it
            database.executemany("UPDATE turns SET file = ?, start = ?, size = ? WHERE file = ? AND start = ?", frames)
            database.execute("DELETE FROM turns WHERE file = ?", (name,))
            add_tombstones(database, broken, "dropped", now)
    except BaseException:
        turn_files.path_of(folder, copy).unlink(missing_ok=True)
        raise
    turn_files.path_of(folder, name).unlink(missing_ok=True)


def _copy_without(
    folder: Path, database: sqlite3.Connection, name: str, copy: str, sessions: Collection[str]
) -> tuple[list[tuple[str, int, int, str, int]], set[str]]:
    """Copies a file without the turns of some sessions.

    Returns (copy, start, size, file, its start) of each frame, and the other sessions that have a frame which cannot
    be read.
    """
    rows = database.execute("SELECT start, size, session FROM turns WHERE file = ? ORDER BY start", (name,)).fetchall()
    frames, broken, end = [], set(), 0
    if all(session in sessions for *_, session in rows):
        return frames, broken
    with open_atomically(turn_files.path_of(folder, copy)) as target:
        for (start, size), rows_of_frame in itertools.groupby(rows, key=lambda row: row[:2]):
            sessions_of_frame = {session for *_, session in rows_of_frame}
            try:
                frame = turn_files.read_frame(folder, name, start, size)
                if not sessions_of_frame.isdisjoint(sessions):
                    turns = turn_files.unpack(frame, f"{name} at byte {start}")
                    others = [turn for turn in turns if turn.session not in sessions]
                    frame = turn_files.pack(others) if others else b""
            except (FileNotFoundError, UserError) as error:
                logging.error("traffic: the sessions of a frame that cannot be read are dropped: %s", error)
                broken |= sessions_of_frame.difference(sessions)
                continue
            if frame:
                target.write(frame)
                frames.append((copy, end, len(frame), name, start))
                end += len(frame)
    return frames, broken


def next_file(folder: Path, day: str) -> str:
    """Returns the name of the next file of a day, after those that exist."""
    return f"{day}/{_newest_number(folder, day) + 1:03d}"


def newest_file(folder: Path, day: str) -> str | None:
    """Returns the name of the newest file of a day, or None."""
    number = _newest_number(folder, day)
    return None if number < 0 else f"{day}/{number:03d}"


def _newest_number(folder: Path, day: str) -> int:
    """The number of the newest file of a day, or -1."""
    names = (path.name.partition(".")[0] for path in (folder / turn_files.FOLDER / day).glob("*.jsonl.zst"))
    return max((int(name) for name in names if name.isdigit()), default=-1)


def _delete_rows(database: sqlite3.Connection, sessions: Collection[str]) -> None:
    """Deletes the rows of sessions from every table that has a column `session`, such as that of labels."""
    tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in tables:
        if "session" in {row[1] for row in database.execute(f'PRAGMA table_info("{table}")')}:
            database.executemany(f'DELETE FROM "{table}" WHERE session = ?', [(session,) for session in sessions])


def overwrite_log(database: sqlite3.Connection) -> bool:
    """Moves the write-ahead log, which still has deleted rows, into the database.

    Returns whether it did. Another process that reads prevents it; it waits for that as long as the connection waits.
    """
    (is_busy, *_) = database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not is_busy
