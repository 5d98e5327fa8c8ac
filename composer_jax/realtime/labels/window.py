"""What a label of a session may see: turns and events up to one age after its last edit, by the server's clock.

A label is a function of the traffic and the horizon alone. The moment at which it is made changes nothing, so that
sessions with early bad ends do not get their labels before the others.
"""

import dataclasses
from collections.abc import Sequence

from composer_jax.serve.traffic.records import Event, SampledTurn, SessionTraffic

GRACE_S = 3600.0
"""An event may arrive so long after the horizon; what arrives later is counted and changes no label."""
TOLERANCE, TOLERANCE_S = 0.1, 60.0
"""Part of the horizon, and seconds, by which a measurement at the horizon may be older."""

ACTIVITIES = ("shown", "accepted", "rejected")
"""Events that show that the session's diff is still changing."""


@dataclasses.dataclass(frozen=True)
class LabelWindow:
    """The part of a session that its label sees."""

    start: float
    """Unix seconds of the last edit or, without one, of the last answer: age 0."""
    due: float
    """The label can be made from here on."""
    traffic: SessionTraffic
    """Turns up to `start`, events up to the horizon that arrived before `due`. No side turns."""
    late: int
    """Events of the window's ages that arrived after `due`."""
    continues: bool
    """Whether the session goes on after `due`; that part has no label."""


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
    due = start + horizon + grace
    seen = [event for event in traffic.events if event.time <= _oldest(event, start, horizon)]
    in_time = [event for event in seen if event.arrival <= due]
    return LabelWindow(
        start,
        due,
        SessionTraffic(traffic.record, tuple(turn for turn in turns if turn.time <= start), _unique(in_time)),
        late=len(seen) - len(in_time),
        continues=activities[-1] > start,
    )


def _oldest(event: Event, start: float, horizon: float) -> float:
    """Returns the latest time at which an event still belongs to an age."""
    extra = TOLERANCE * horizon + TOLERANCE_S if event.kind == "edited_after" else 0.0
    return start + horizon + extra


def _unique(events: Sequence[Event]) -> tuple[Event, ...]:
    """Returns the events without those whose id came before."""
    first: dict[str, Event] = {}
    for event in events:
        first.setdefault(event.id, event)
    return tuple(first.values())


def main_turns(traffic: SessionTraffic) -> list[SampledTurn]:
    """Returns the answers of the conversation, by time."""
    return [turn for turn in traffic.turns if turn.kind == "main"]


def events_of(traffic: SessionTraffic, *kinds: str) -> list[Event]:
    """Returns the events of these kinds, by time."""
    return [event for event in traffic.events if event.kind in kinds]
