"""What a label of a session may see: turns and events up to one age after its last edit, by the server's clock.

A label is a function of the traffic and the horizon alone. The moment at which it is made changes nothing, so that
sessions with early bad ends do not get their labels before the others.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import get_args

from composer_jax.serve.traffic.records import Event, EventKind, SampledTurn, SessionTraffic

GRACE_S = 3600.0
"""An event may arrive so long after the horizon; what arrives later is counted and changes no label."""
WRITE_MARGIN_S = 60.0
"""Seconds for which an event that has arrived may wait in the server's queue before it can be read."""
TOLERANCE, TOLERANCE_S = 0.1, 60.0
"""Part of the horizon, and seconds, by which a measurement at the horizon may be older or younger."""

ACTIVITIES = ("shown", "accepted", "rejected")
"""Events that show that the session's diff is still changing."""
SOURCES = (
    frozenset(("edited_after", "commit", "undo", "tests_run", "repo_unreachable")),  # launch.track
    frozenset(get_args(EventKind)) - {"edited_after", "commit", "tests_run", "repo_unreachable"},
)
"""Kinds of events that one program sends: what measures the working tree, and the harness with its user interface."""


@dataclasses.dataclass(frozen=True)
class LabelWindow:
    """The part of a session that its label sees."""

    start: float
    """Unix seconds of the last edit or, without one, of the last answer: age 0."""
    due: float
    """Unix seconds from which on the label can be made."""
    traffic: SessionTraffic
    """Turns up to `start`, events up to the horizon that arrived within the grace. No side turns."""
    late: int
    """Events of the window's ages that had arrived after the grace when this was read."""


def label_window(traffic: SessionTraffic, horizon: float, grace: float = GRACE_S) -> LabelWindow:
    """Returns what the label of a session at an age sees.

    The session's age starts at the first activity (an answer to the user, a diff that is shown, accepted or rejected)
    that no other one follows within the horizon.

    Args:
      horizon: age in seconds.
      grace: seconds that an event may arrive after it.
    """
    turns = [turn for turn in traffic.turns if turn.kind != "side"]
    activities = sorted(
        [turn.time for turn in turns if turn.kind == "main"]
        # One that arrives later than the grace could move the start of a label that is already made.
        + [e.time for e in traffic.events if e.kind in ACTIVITIES and e.arrival <= e.time + grace]
    ) or [traffic.record.opened]
    pairs = zip(activities, activities[1:], strict=False)
    start = next((time for time, following in pairs if following > time + horizon), activities[-1])
    end = start + horizon
    of_age = [
        event
        for event in _unique(traffic.events)
        if event.time <= end + (tolerance(horizon) if event.kind == "edited_after" else 0.0)
    ]
    in_time = tuple(event for event in of_age if event.arrival <= end + grace)
    return LabelWindow(
        start,
        end + grace + WRITE_MARGIN_S,
        SessionTraffic(traffic.record, tuple(turn for turn in turns if turn.time <= start), in_time),
        late=len(of_age) - len(in_time),
    )


def tolerance(horizon: float) -> float:
    """Returns the seconds by which the age of a measurement may differ from the horizon."""
    return TOLERANCE * horizon + TOLERANCE_S


def _unique(events: Sequence[Event]) -> Iterable[Event]:
    """Returns the first event of each id."""
    first: dict[str, Event] = {}
    for event in events:
        first.setdefault(event.id, event)
    return first.values()


def main_turns(traffic: SessionTraffic) -> list[SampledTurn]:
    """Returns the answers of the conversation, by time."""
    return [turn for turn in traffic.turns if turn.kind == "main"]


def continued_turns(traffic: SessionTraffic) -> list[SampledTurn]:
    """Returns the answers with which the user went on, by time: the path from the root to the last answer.

    Other answers to one request and retries are left out. A later root, where the client edited the history or
    shortened the context, continues the last answer before it that does not descend from the same prompt.
    """
    turns = main_turns(traffic)
    by_id = {turn.id: turn for turn in traffic.turns}

    def root(turn: SampledTurn) -> SampledTurn:
        while turn.parent in by_id:
            turn = by_id[turn.parent]
        return turn

    def previous(turn: SampledTurn) -> SampledTurn | None:
        if turn.parent in by_id:
            return by_id[turn.parent]
        before = (one for one in reversed(turns) if one.time < turn.time)
        return next((one for one in before if list(root(one).suffix) != list(turn.suffix)), None)

    path, turn = [], turns[-1] if turns else None
    while turn:
        path.append(turn)
        turn = previous(turn)
    return [turn for turn in reversed(path) if turn.kind == "main"]


def is_reported(traffic: SessionTraffic, kind: EventKind) -> bool:
    """Returns whether the session has an event from a program that sends events of a kind.

    Where it is false, no such event means that nobody could have sent one. An undo is evidence of undos alone, which
    both programs send.
    """
    kinds = {event.kind for event in traffic.events}
    return kind in kinds or any(kind in source and (source - {"undo"}) & kinds for source in SOURCES)


def events_of(traffic: SessionTraffic, *kinds: str) -> list[Event]:
    """Returns the events of these kinds, by time."""
    return [event for event in traffic.events if event.kind in kinds]
