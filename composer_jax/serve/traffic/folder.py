"""TrafficFolder: reads what servers have written, also while one writes."""

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.serve.traffic.database import NAME, open_database
from composer_jax.serve.traffic.policy import read_policy
from composer_jax.serve.traffic.records import Event, SampledTurn, SessionRecord, SessionTraffic
from composer_jax.serve.traffic.turn_files import read_turns

RECORD = "session, owner, user, repository, organisation, opened, arm, consent_text"
IS_LIVE = """EXISTS (SELECT 1 FROM turns WHERE turns.session = sessions.session)
  AND NOT EXISTS (SELECT 1 FROM tombstones WHERE kind = 'session' AND name = sessions.session)"""


class TrafficFolder:
    """The sessions in a traffic folder. A session with a tombstone is in none of them."""

    def __init__(self, path: Path | str) -> None:
        """Raises UserError for a folder that no server wrote, or of another schema."""
        self.path = Path(path)
        self.policy = read_policy(self.path)
        if not (self.path / NAME).is_file():
            raise UserError(f"{self.path} has no {NAME}; give a traffic folder that a server wrote.")

    def sessions(self) -> list[SessionRecord]:
        """Returns the sessions that have turns, in the order of their opening."""
        query = f"SELECT {RECORD} FROM sessions WHERE {IS_LIVE} ORDER BY opened, session"
        with self._database() as database:
            return [SessionRecord(*row) for row in database.execute(query)]

    def read(self, session: str) -> SessionTraffic:
        """Returns a session. Raises UserError for one that is unknown, or has a tombstone."""
        missing = None
        while True:
            with self._database() as database, database:
                database.execute("BEGIN")  # one state of the database for the three queries
                query = f"SELECT {RECORD} FROM sessions WHERE session = ? AND {IS_LIVE}"
                row = database.execute(query, (session,)).fetchone()
                query = "SELECT id, file, start, size FROM turns WHERE session = ? ORDER BY rowid"
                places = database.execute(query, (session,)).fetchall()
                query = "SELECT id, session, kind, turn, time, arrival, payload FROM events WHERE session = ?"
                events = database.execute(f"{query} ORDER BY time, rowid", (session,)).fetchall()
            if row is None:
                raise UserError(f"{self.path} has no session {session!r}; it is unknown, or was deleted.")
            try:
                turns = self._turns(places)
            except FileNotFoundError as error:  # copied without deleted sessions; the database names the copy now
                if places == missing:
                    raise UserError(f"{error.filename} is missing; restore it from a copy.") from error
                missing = places
                continue
            events = [Event(*row[:6], payload=json.loads(row[6])) for row in events]
            return SessionTraffic(SessionRecord(*row), turns, events)

    def is_forgotten(self, session: str) -> bool:
        """Returns whether a session has a tombstone: its user was forgotten, or it was dropped."""
        query = "SELECT 1 FROM tombstones WHERE kind = 'session' AND name = ?"
        with self._database() as database:
            return database.execute(query, (session,)).fetchone() is not None

    def _turns(self, places: list[tuple[str, str, int, int]]) -> list[SampledTurn]:
        frames = list(dict.fromkeys((file, start, size) for _, file, start, size in places))
        turns = {turn.id: turn for turn in read_turns(self.path, frames, {row[0] for row in places})}
        return [turns[row[0]] for row in places]

    @contextlib.contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        try:
            with contextlib.closing(open_database(self.path)) as database:
                yield database
        except sqlite3.Error as error:
            raise UserError(f"{self.path / NAME} cannot be read ({error}); try again, or restore it.") from error
