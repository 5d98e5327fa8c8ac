"""traffic.sqlite: the index of turns, the sessions, their events, and tombstones.

Every function that needs a table of its own in this file creates it with CREATE TABLE IF NOT EXISTS. A table with a
column `session` loses the rows of a session that is deleted (retention.py).
"""

import sqlite3
from pathlib import Path

NAME = "traffic.sqlite"
BUSY_SECONDS = 5.0
"""A statement waits so long for another process before it fails."""

TABLES = """
CREATE TABLE IF NOT EXISTS sessions (
  session TEXT PRIMARY KEY, owner TEXT, user TEXT, repository TEXT, organisation TEXT, opened REAL, arm TEXT,
  consent_text TEXT, day TEXT, run INTEGER);
CREATE INDEX IF NOT EXISTS sessions_by_user ON sessions (user);
CREATE INDEX IF NOT EXISTS sessions_by_day ON sessions (day);
CREATE TABLE IF NOT EXISTS turns (
  id TEXT PRIMARY KEY, session TEXT, file TEXT, start INTEGER, size INTEGER, tokens INTEGER, hash BLOB,
  has_secret INTEGER);
CREATE INDEX IF NOT EXISTS turns_by_session ON turns (session);
CREATE INDEX IF NOT EXISTS turns_by_file ON turns (file, start);
CREATE TABLE IF NOT EXISTS events (
  session TEXT, id TEXT, kind TEXT, turn TEXT, time REAL, arrival REAL, payload TEXT, PRIMARY KEY (session, id));
CREATE TABLE IF NOT EXISTS tombstones (
  kind TEXT, name TEXT, reason TEXT, time REAL, erased INTEGER DEFAULT 0, PRIMARY KEY (kind, name));
CREATE INDEX IF NOT EXISTS tombstones_to_erase ON tombstones (erased);
CREATE TABLE IF NOT EXISTS runs (run INTEGER PRIMARY KEY, closed INTEGER DEFAULT 0);
"""
"""sessions.day: the folder of all turns of the session; sessions.run: the last server that wrote a turn of it.
turns: frame [start, start + size) of the file turns/FILE holds the turn; tokens, hash: number and hash of the ids of
its prompt and answer (conversation_tree.py). tombstones.kind: "session" or "user"; reason: "forgotten", "dropped"
or "interrupted"; erased: whether its rows and turns are gone. runs: the servers that have written here."""


def open_database(folder: Path | str, *, busy_seconds: float = BUSY_SECONDS) -> sqlite3.Connection:
    """Returns a connection to the database of a traffic folder, whose tables exist; the caller closes it.

    A commit is on disk when it returns, and deleted rows are overwritten. The connection is for one thread.
    """
    connection = sqlite3.connect(Path(folder) / NAME, timeout=busy_seconds)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA secure_delete=ON")
        connection.executescript(TABLES)
    except BaseException:
        connection.close()
        raise
    return connection
