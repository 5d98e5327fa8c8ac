"""The rows of sessions in the database: who owns a session, and whether it may go on."""

import dataclasses
import sqlite3

from composer_jax.serve.traffic import retention
from composer_jax.serve.traffic.records import SessionRecord


@dataclasses.dataclass(frozen=True)
class SessionRow:
    """A session of the key that asks for it."""

    user: str
    day: str
    """The folder of its turns."""
    was_interrupted: bool
    """Whether a server was killed after the session's last turn was written: a turn of it may be lost."""


def open_session(database: sqlite3.Connection, record: SessionRecord, run: int) -> SessionRow | None:
    """Returns the row of a session, which is added if there is none. Inside the caller's transaction.

    None if the session has a tombstone, another key owns it, or its user was forgotten after it opened.

    run: of the server that writes.
    """
    has_tombstone = """SELECT 1 FROM tombstones WHERE (kind = 'session' AND name = ?)
      OR (kind = 'user' AND name = ? AND time >= ?)"""
    if database.execute(has_tombstone, (record.session, record.user, record.opened)).fetchone():
        return None
    find = """SELECT owner, user, day,
      EXISTS (SELECT 1 FROM runs WHERE runs.run >= sessions.run AND runs.run < ? AND NOT closed)
      FROM sessions WHERE session = ?"""
    values = database.execute(find, (run, record.session)).fetchone()
    if values is None:
        row = SessionRow(record.user, retention.day_of(record.opened), was_interrupted=False)
        values = (*dataclasses.astuple(record), row.day, run)
        database.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        return row
    owner, user, day, was_interrupted = values
    if owner != record.owner:
        return None
    if not was_interrupted:
        database.execute("UPDATE sessions SET run = ? WHERE session = ? AND run != ?", (run, record.session, run))
    return SessionRow(user, day, bool(was_interrupted))


def owners_of(database: sqlite3.Connection, sessions: set[str]) -> dict[str, str]:
    """Returns the owner of each of these sessions that has a row."""
    query = "SELECT owner FROM sessions WHERE session = ?"
    rows = {session: database.execute(query, (session,)).fetchone() for session in sessions}
    return {session: row[0] for session, row in rows.items() if row is not None}
