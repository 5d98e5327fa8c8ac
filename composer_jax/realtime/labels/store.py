"""The table of labels in traffic.sqlite. A label is made once; a second insert changes nothing."""

import dataclasses
import json
import sqlite3
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from composer_jax.realtime.labels.signal_types import SIGNAL_STATES, Signal, SignalState

TABLE = """
CREATE TABLE IF NOT EXISTS labels (
  session TEXT NOT NULL, user TEXT NOT NULL, horizon REAL NOT NULL, labeller TEXT NOT NULL, judge TEXT NOT NULL,
  start REAL NOT NULL, made REAL NOT NULL, bucket TEXT NOT NULL, first_version INTEGER, last_version INTEGER,
  late INTEGER NOT NULL, signals TEXT NOT NULL, PRIMARY KEY (session, horizon, labeller))
"""
STATES: Mapping[str, SignalState] = {state: state for state in SIGNAL_STATES}
INSERT = f"INSERT OR IGNORE INTO labels VALUES ({', '.join('?' * 12)})"


@dataclasses.dataclass(frozen=True, slots=True)
class Label:
    """What became of a session at one age. Its reward follows from the labels beside it (reward.py)."""

    session: str
    user: str
    """See SessionRecord."""
    horizon: float
    """Age in seconds."""
    labeller: str
    """Version of the signals (label_sessions.py)."""
    judge: str
    """Version of the judge of follow-ups."""
    start: float
    """Unix seconds of age 0: the session's last edit or answer. Later turns have no part in the label."""
    made: float
    """Unix seconds."""
    bucket: str
    first_version: int | None
    """Lowest version of weights among the sampled tokens; None without any."""
    last_version: int | None
    late: int
    """Events of this age that had arrived too late when the label was made."""
    signals: Mapping[str, Signal]
    """Values with masks and reasons."""

    @property
    def version(self) -> str:
        """Versions of the weights that sampled the session: "7", or "7-8" if it spans an update, or "none"."""
        if self.first_version is None:
            return "none"
        same = self.first_version == self.last_version
        return str(self.first_version) if same else f"{self.first_version}-{self.last_version}"


class LabelStore:
    """Labels in a database, which the caller opens and closes."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        with database:
            database.execute(TABLE)

    def insert(self, labels: Iterable[Label], is_forgotten: Callable[[str], bool] = lambda session: False) -> None:
        """Stores labels in one transaction: all of them or none. Those that exist stay as they are.

        is_forgotten: whether a session has a tombstone and gets no label. It is called when nobody else can write: a
        tombstone that is written later deletes the label.
        """
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            remaining = (label for label in labels if not is_forgotten(label.session))
            self._database.executemany(INSERT, map(_to_row, remaining))

    def labelled(self, horizon: float, labeller: str) -> set[str]:
        """Returns the sessions that have such a label."""
        query = "SELECT session FROM labels WHERE horizon = ? AND labeller = ?"
        return {session for (session,) in self._database.execute(query, (horizon, labeller))}

    def read(
        self,
        horizon: float,
        labeller: str | None = None,
        *,
        since: float = 0.0,
        signals: Sequence[str] = (),
        most: int | None = None,
        is_wanted: Callable[[str], bool] = lambda session: True,
    ) -> list[Label]:
        """Returns the labels of an age, by session; of the labeller of the newest label if none is given.

        Args:
          since: Unix seconds; labels that start earlier are left out.
          signals: names of those that are read, which makes labels small; () for all.
          most: that many of them, with the latest starts; None for all.
          is_wanted: whether a session's label is read; signals of others are not parsed.
        """
        labeller = labeller or self.newest_labeller(horizon)
        names = ", ".join(field.name for field in dataclasses.fields(Label) if field.name != "signals")
        column = f"json_object({', '.join('?, json_extract(signals, ?)' for _ in signals)})" if signals else "signals"
        paths = [part for name in signals for part in (name, f'$."{name}"')]
        query = f"""SELECT * FROM (SELECT {names}, {column} FROM labels
          WHERE horizon = ? AND labeller = ? AND start >= ? ORDER BY start DESC LIMIT ?) ORDER BY session"""
        limit = -1 if most is None else most
        rows = self._database.execute(query, (*paths, horizon, labeller, since, limit))
        place = names.split(", ").index("session")
        return [_from_row(row) for row in rows if is_wanted(row[place])]

    def newest_labeller(self, horizon: float) -> str:
        """Returns the labeller of the newest label of an age; empty without labels."""
        query = "SELECT labeller FROM labels WHERE horizon = ? ORDER BY made DESC, labeller LIMIT 1"
        row = self._database.execute(query, (horizon,)).fetchone()
        return row[0] if row else ""


def _to_row(label: Label) -> tuple[Any, ...]:
    fields = {field.name: getattr(label, field.name) for field in dataclasses.fields(label)}
    signals = {
        name: {key: value for key, value in dataclasses.asdict(signal).items() if value not in (None, (), {})}
        for name, signal in label.signals.items()
    }
    return tuple((fields | {"signals": json.dumps(signals)}).values())


def _from_row(row: tuple[Any, ...]) -> Label:
    fields: dict[str, Any] = dict(zip((field.name for field in dataclasses.fields(Label)), row, strict=True))
    fields["signals"] = {
        # Names, states and reasons are the same in many labels, of which there may be a million.
        sys.intern(name): Signal(
            one.get("value"),
            STATES[one["state"]],
            tuple(map(sys.intern, one.get("reasons", ()))),
            one.get("by_turn", {}),
        )
        for name, one in json.loads(fields["signals"]).items()
        if one is not None
    }
    return Label(**fields)
