"""POST /events: what users did with the answers of their sessions, in the words of EVENT_FIELDS.

    {"events": [{"id": "5f0a...", "session": ID, "kind": "accepted", "turn": "chatcmpl-...", "age": 12.5,
                 "payload": {"hunks": ["9c1b..."]}}]}

All events of a request are stored, or none. An event whose id the session has already changes nothing.
"""

import asyncio
import contextlib
import json
import re
import sqlite3
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, StrictStr, model_validator

from composer_jax.serve.errors import ApiError
from composer_jax.serve.traffic.database import open_database
from composer_jax.serve.traffic.records import EVENT_FIELDS, EventKind
from composer_jax.serve.traffic.session_rows import open_session
from composer_jax.serve.traffic.writer import TrafficWriter

MOST_EVENTS = 100
"""Of one request."""
MOST_HASHES = 1000
EVENT_BYTES = 640
"""An event counts once more for each so many bytes of its payload."""
MOST_SESSION_EVENTS = 10_000
MOST_WAITING = 16
"""Requests that wait for the database; more get status 503."""
BUSY_SECONDS = 3.0
MOST_AGE = 7 * 86_400.0
"""Seconds; a client that says more is not believed."""
RATES = {"server": (4000, 400.0), "key": (2000, 100.0), "session": (500, 20.0)}
"""Events that come at once, and those per second afterwards: (burst, rate)."""
MOST_BUCKETS = 1 << 16
_HASH = re.compile("[0-9a-f]{4,64}")


class EventBody(BaseModel):
    """One event as a client sends it."""

    model_config = ConfigDict(extra="forbid")

    id: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    session: Annotated[StrictStr, Field(min_length=1, max_length=256)]
    kind: EventKind
    turn: Annotated[StrictStr, Field(pattern=r"^([a-z]{2,10}[-_][0-9a-f]{24})?$")] = ""
    """Id of the answer that it is about; empty for an event of the whole session."""
    age: Annotated[float, Field(strict=True, allow_inf_nan=False)] = 0.0
    """Seconds since it happened, by the client's clock."""
    payload: dict[str, Any] = {}

    @property
    def weight(self) -> int:
        """For how many events it counts."""
        return 1 + len(json.dumps(self.payload)) // EVENT_BYTES

    @model_validator(mode="after")
    def _check_payload(self) -> Self:
        fields = EVENT_FIELDS[self.kind]
        if self.payload.keys() != fields.keys():
            raise ValueError(f"the payload of {self.kind} has {', '.join(fields) or 'no fields'}; send these")
        for name, form in fields.items():
            if not _fits(self.payload[name], form):
                raise ValueError(f"payload.{name} of {self.kind} is {form}; send such a value")
        return self


class EventsBody(BaseModel):
    """Of POST /events."""

    model_config = ConfigDict(extra="forbid")

    events: Annotated[list[EventBody], Field(min_length=1, max_length=MOST_EVENTS)]


def _fits(value: Any, form: str) -> bool:
    """Whether a value has a form of EVENT_FIELDS."""
    is_integer = type(value) is int and abs(value) < 2**53
    match form:
        case "hashes":
            if not isinstance(value, list) or len(value) > MOST_HASHES:
                return False
            return all(isinstance(one, str) and _HASH.fullmatch(one) for one in value)
        case "count":
            return is_integer and value >= 0
        case "integer":
            return is_integer
        case "seconds":
            return type(value) in (int, float) and 0 <= value < 2**53
        case _:
            numbers = form.replace("|", "").replace("-", "").isdigit()
            return type(value) is (int if numbers else str) and str(value) in form.split("|")


class RateLimit:
    """Token buckets by name; the least recently used of too many are forgotten."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def take(self, kind: str, name: str, n: int) -> None:
        """Takes n events. Raises ApiError with status 429 if they come too fast."""
        (burst, rate), now = RATES[kind], self._clock()
        left, then = self._buckets.pop((kind, name), (float(burst), now))
        left = min(burst, left + max(0.0, now - then) * rate)
        self._buckets[kind, name] = (left - n if left >= n else left, now)
        if len(self._buckets) > MOST_BUCKETS:
            self._buckets.popitem(last=False)
        if left < n:
            raise ApiError(
                f"the {kind} has sent more than {burst} events, and may send {rate:g} per second; send them later.",
                status=429,
                code="rate_limit_exceeded",
            )


class EventLog:
    """Stores events in the database of a traffic folder, in a thread of its own."""

    def __init__(self, traffic: TrafficWriter, clock: Callable[[], float] = time.time) -> None:
        """clock: Unix seconds."""
        self._traffic, self._clock, self.limit = traffic, clock, RateLimit()
        self._thread = ThreadPoolExecutor(1, "traffic-events")
        self._waiting = 0

    async def add(self, key: str, events: Sequence[EventBody]) -> int:
        """Stores events of a client's sessions; returns how many are new.

        key: the client's API key.

        Raises ApiError: 404 for a session that is unknown, 403 for one of another key, 409 for one that has as many as
        it may, 429 for events that come too fast, 503 if the database does not take them.
        """
        weight = sum(event.weight for event in events)
        self.limit.take("key", key, weight)  # first: a key that sends too much takes nothing from others
        self.limit.take("server", "", weight)
        if self._waiting >= MOST_WAITING:
            raise self._refuse(events, "other events wait for the disk")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._add, key, events)
        except sqlite3.Error as error:
            raise self._refuse(events, str(error)) from error
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=True)

    def _refuse(self, events: Sequence[EventBody], reason: str) -> ApiError:
        self._traffic.counts.refused_events += len(events)
        return ApiError(f"the events were not stored ({reason}); send them again later.", status=503)

    def _add(self, key: str, events: Sequence[EventBody]) -> int:
        owner, now, new = self._traffic.policy.hash(f"key {key}"), self._clock(), 0
        sessions: Counter[str] = Counter()
        for event in events:
            sessions[event.session] += event.weight
        queued = {session: self._traffic.find_queued((session, owner)) for session in sessions}
        with contextlib.closing(open_database(self._traffic.folder, busy_seconds=BUSY_SECONDS)) as database, database:
            database.execute("BEGIN IMMEDIATE")
            opened: dict[str, float] = {}
            for session, n in sessions.items():
                if (record := queued[session]) is not None:
                    open_session(database, record, self._traffic.run)
                opened[session] = _check_owner(database, session, owner)
                self.limit.take("session", session, n)
                query = f"SELECT coalesce(sum(1 + length(payload) / {EVENT_BYTES}), 0) FROM events WHERE session = ?"
                stored = database.execute(query, (session,)).fetchone()[0]
                if stored + n > MOST_SESSION_EVENTS:
                    most = f"the session has {stored} events of at most {MOST_SESSION_EVENTS}; send no more of it."
                    raise ApiError(most, status=409)  # not 429: clients would try again
            for event in events:
                happened = max(opened[event.session], now - min(max(event.age, 0.0), MOST_AGE))
                row = (event.session, event.id, event.kind, event.turn, happened, now, json.dumps(event.payload))
                new += database.execute("INSERT OR IGNORE INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", row).rowcount
        return new


def _check_owner(database: sqlite3.Connection, session: str, owner: str) -> float:
    """When a session opened. Raises ApiError if it is unknown, deleted, or another key's."""
    query = """SELECT owner, opened FROM sessions WHERE session = ?
      AND NOT EXISTS (SELECT 1 FROM tombstones WHERE kind = 'session' AND name = session)"""
    row = database.execute(query, (session,)).fetchone()
    if row is None:
        raise ApiError(f"no session {session!r} is stored; it is unknown, without consent, or deleted.", status=404)
    if row[0] != owner:
        raise ApiError(f"the session {session!r} is another client's; send events of your own.", status=403)
    return row[1]
