"""Signals of what became of the session's diff: kept lines, size, accepted hunks, undo, tests."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from composer_jax.realtime.labels.signal_types import LabelContext, Signal, censored, observed, undefined
from composer_jax.realtime.labels.window import events_of, is_reported, main_turns, tolerance
from composer_jax.serve.traffic.records import Event, SessionTraffic

CHURN_FLOOR = 0.5
"""Survival of other lines below which kept lines are no longer corrected."""
UNDO_S = 600.0
"""An undo within so many seconds of the answer counts."""
EDIT_LINES = 1000
"""Lines from which a session's edit weighs no more: one generated file, or a forged count."""
NO_CLIENT = "no program sent such events"


def keep(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns the share of the diff's lines that are as the agent left them: (A kept + B kept) / (A + B)."""
    measured = _diff_at(traffic, horizon)
    if isinstance(measured, Signal):
        return measured
    lines = measured["added"] + measured["deleted"]
    if not lines:
        return censored("nobody can judge its lines") if measured["censored"] else undefined("no edits")
    reasons = (f"{measured['censored']} lines censored",) if measured["censored"] else ()
    return observed((measured["added_kept"] + measured["deleted_kept"]) / lines, *reasons)


def keep_corrected(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns keep / max(0.5, s) clipped to 1, where s is the share of other lines of the same files that survived."""
    raw, measured = keep(traffic, horizon, context), _diff_at(traffic, horizon)
    if raw.value is None or isinstance(measured, Signal):
        return raw
    if not measured["others"]:
        return observed(raw.value, *raw.reasons, "no other lines")
    survival = measured["others_kept"] / measured["others"]
    return observed(min(1.0, raw.value / max(CHURN_FLOOR, survival)), *raw.reasons)


def edited(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns 1 if the session's final diff has lines, else 0: a session without edits is an outcome."""
    measured = _diff_at(traffic, horizon)
    return measured if isinstance(measured, Signal) else observed(_lines(measured) > 0)


def edit_weight(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns log(1 + A + B), for at most EDIT_LINES lines: the weight of a session's edit, never its plain size."""
    measured = _diff_at(traffic, horizon)
    return measured if isinstance(measured, Signal) else observed(math.log1p(min(EDIT_LINES, _lines(measured))))


def accept_share(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns accepted hunks / shown hunks; the last word about a hunk counts.

    It has the parts of single answers where every event `shown` names one. There a hunk is that of the last answer that
    showed it: the user did not accept the lines of an answer that was overwritten.
    """
    shown = {hunk for event in events_of(traffic, "shown") for hunk in event.payload["hunks"]}
    if not shown:
        return undefined("no hunk was shown") if is_reported(traffic, "shown") else censored(NO_CLIENT)
    verdicts = {
        hunk: event.kind == "accepted"
        for event in events_of(traffic, "accepted", "rejected")
        for hunk in event.payload["hunks"]
    }
    if not all(event.turn for event in events_of(traffic, "shown")):
        return observed(_accepted(shown, verdicts))
    last_shown = {hunk: event.turn for event in events_of(traffic, "shown") for hunk in event.payload["hunks"]}
    by_turn: dict[str, set[str]] = {}
    for hunk, answer in last_shown.items():
        by_turn.setdefault(answer, set()).add(hunk)
    parts = {answer: _accepted(hunks, verdicts) for answer, hunks in by_turn.items()}
    return observed(_accepted(shown, verdicts), by_turn=parts)


def _accepted(hunks: Collection[str], verdicts: Mapping[str, bool]) -> float:
    return sum(verdicts.get(hunk, False) for hunk in hunks) / len(hunks)


def undo(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns 1 if the user restored the files within ten minutes of an answer, else 0."""
    if not is_reported(traffic, "undo"):
        return censored(NO_CLIENT)
    hits = {answer: 1.0 for answer, seconds in delays(traffic, "undo") if seconds <= UNDO_S}
    return observed(bool(hits), by_turn=hits)


def tests(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns 1 if the user's own tests pass after the work and 0 if they fail; they must have run before it, too."""
    runs = {event.payload["phase"]: event.payload["exit_code"] for event in events_of(traffic, "tests_run")}
    if not is_reported(traffic, "tests_run"):
        return censored(NO_CLIENT)
    if missing := {"before", "after"} - runs.keys():
        return undefined(f"no tests {' and '.join(sorted(missing))}")
    return observed(runs["after"] == 0, "passed before" if runs["before"] == 0 else "failed before")


def delays(traffic: SessionTraffic, *kinds: str) -> list[tuple[str, float]]:
    """Returns (answer, seconds from its end) of every event of these kinds, by time.

    An event that names no answer belongs to the last one before it.
    """
    turns, pairs = main_turns(traffic), []
    for event in events_of(traffic, *kinds):
        named = [turn for turn in turns if turn.answer == event.turn] if event.turn else []
        before = named or [turn for turn in turns if turn.time <= event.time]
        if before:
            pairs.append((before[-1].answer, max(0.0, event.time - before[-1].time)))
    return pairs


def _lines(measured: Mapping[str, Any]) -> int:
    return measured["added"] + measured["deleted"] + measured["censored"]


def _diff_at(traffic: SessionTraffic, horizon: float) -> Mapping[str, Any] | Signal:
    """Returns the payload of the last measurement at exactly this age, or why there is none."""
    of_age = [event for event in events_of(traffic, "edited_after") if event.payload["horizon"] == horizon]
    possible = [event for event in of_age if _is_possible(event, traffic, horizon)]
    if possible:
        return possible[-1].payload
    if of_age:
        return censored("measured at an age that the session did not have")
    if not is_reported(traffic, "edited_after"):
        return censored(NO_CLIENT)
    if events_of(traffic, "repo_unreachable"):
        return censored("the repository was out of reach")
    return censored("no measurement at this age")


def _is_possible(event: Event, traffic: SessionTraffic, horizon: float) -> bool:
    """Whether the last edit can be so old at the time of the event, and no count exceeds its whole.

    The last edit is not before the last hunk that was shown, or without one, not before the first answer.
    """
    counts = event.payload
    parts = (("added_kept", "added"), ("deleted_kept", "deleted"), ("others_kept", "others"))
    shown = [one.time for one in events_of(traffic, "shown")]
    last_edit = max(shown) if shown else min((turn.time for turn in main_turns(traffic)), default=traffic.record.opened)
    is_old_enough = event.time >= last_edit + horizon - tolerance(horizon)
    return is_old_enough and all(counts[part] <= counts[whole] for part, whole in parts)
