"""All labels are made at one age, whenever they are made."""

import dataclasses

import pytest

from composer_jax.realtime.labels.window import GRACE_S, WRITE_MARGIN_S, continued_turns, is_reported, label_window
from tests.realtime.labels.sessions import OPENED, H, event, measured, session, turn


def test_the_age_starts_at_the_last_activity():
    traffic = session([turn("a1", 100, "Fix it"), turn("a2", 700)], [event("accepted", 900, "a2", hunks=["a"])])
    window = label_window(traffic, H)
    assert (window.start, window.due) == (OPENED + 900, OPENED + 900 + H + GRACE_S + WRITE_MARGIN_S)
    assert label_window(session(), H).start == OPENED


def test_side_requests_are_not_seen():
    window = label_window(session([turn("a1", 100), turn("title", 500, kind="side")]), H)
    assert window.start == OPENED + 100
    assert [one.answer for one in window.traffic.turns] == ["a1"]


@pytest.mark.parametrize(
    ("one", "is_seen", "late"),
    [
        (event("undo", 100 + H, hunks=[]), True, 0),
        (event("undo", 101 + H, hunks=[]), False, 0),  # older than the horizon, though it arrives in time
        (event("undo", 200, hunks=[], arrival=100 + H + GRACE_S), True, 0),
        (event("undo", 200, hunks=[], arrival=101 + H + GRACE_S), False, 1),
        (measured(130 + H), True, 0),  # a measurement may be a little late
        (measured(100 + 1.2 * H), False, 0),
        (measured(100 + H, arrival=101 + H + GRACE_S), False, 1),
    ],
)
def test_events_count_by_age_and_arrival(one, is_seen, late):
    window = label_window(session([turn("a1", 100)], [one]), H)
    assert (list(window.traffic.events), window.late) == ([one] if is_seen else [], late)


def test_a_repeated_event_counts_once():
    one = event("tool_error", 90, error="unknown_tool", name="same")
    assert len(label_window(session([turn("a1", 100)], [one, one]), H).traffic.events) == 1
    late = event("undo", 200, hunks=[], arrival=101 + H + GRACE_S)
    assert label_window(session([turn("a1", 100)], [late, late]), H).late == 1


def test_a_label_does_not_depend_on_when_it_is_made():
    """What happens after the label could have been made changes nothing."""
    turns, events = [turn("a1", 100, "Fix it")], [measured(100 + H, added=2, added_kept=1)]
    early = label_window(session(turns, events), H)
    later = label_window(
        session(
            [*turns, turn("a2", 200 + 2 * H, "More")],
            [
                *events,
                event("undo", 100 + H + 50, hunks=[]),
                measured(200 + 3 * H, added=9),
                # Backdated into the window, it arrives after the grace and moves nothing.
                event("accepted", 300, "a1", hunks=["a"], arrival=4 * H),
            ],
        ),
        H,
    )
    assert (later.start, later.traffic) == (early.start, early.traffic)
    assert later.late == 1


def names(turns):
    return [one.answer for one in turns]


def test_the_continued_branch_leaves_out_siblings_and_retries():
    first = turn("a1", 100, "Fix it")
    sibling = dataclasses.replace(first, id="other", choice=1)
    retried, retry = turn("a2", 200, "More", parent=sibling), turn("a3", 210, "More", parent=sibling)
    last = turn("a4", 300, parent=retry)
    turns = continued_turns(session([first, sibling, retried, retry, last]))
    assert names(turns) == ["a1", "a3", "a4"]
    assert turns[0] is sibling
    assert continued_turns(session()) == []


def test_a_root_continues_the_answer_before_it_unless_it_is_a_retry():
    first, retry = turn("a1", 100, "Fix it"), turn("a2", 110, "Fix it")
    child, edited = turn("a3", 120, parent=retry), turn("a4", 200, "Fix it and answer in German")
    assert names(continued_turns(session([first, retry]))) == ["a2"]
    assert names(continued_turns(session([first, retry, child, edited]))) == ["a2", "a3", "a4"]


def test_one_event_shows_what_else_its_program_reports():
    tracked, closed = session(events=[measured(50)]), session(events=[event("session_closed", 9, reason="user")])
    kinds = ("undo", "tests_run", "shown", "tool_error")
    assert [is_reported(tracked, kind) for kind in kinds] == [True, True, False, False]
    assert [is_reported(closed, kind) for kind in kinds] == [True, False, True, True]
    undone = session(events=[event("undo", 9, hunks=[])])
    assert [is_reported(undone, kind) for kind in kinds] == [True, False, False, False]
