"""Signals of the conversation: the user's next message, questions instead of work, calls, cost, explicit verdicts."""

import math
import re
from collections.abc import Callable, Mapping, Sequence

from composer_jax.realtime.labels.edits import NO_CLIENT, delays, edited, keep
from composer_jax.realtime.labels.judge import QUICK_S, FollowUp, FollowUpJudge, JudgeError
from composer_jax.realtime.labels.signal_types import (
    ConversationText,
    LabelContext,
    Signal,
    censored,
    observed,
    undefined,
)
from composer_jax.realtime.labels.window import continued_turns, events_of, is_reported, main_turns
from composer_jax.serve.traffic.records import Event, EventKind, SampledTurn, SessionTraffic

KEPT_SHARE = 0.5
"""Share of kept lines from which an edit counts as kept, where the user said nothing."""
CHANGE_WORDS = re.compile(
    r"\b(add|change|fix|implement|refactor|rename|remove|delete|write|create|update|make|move|replace|convert|port"
    r"|migrate|optimi[sz]e|speed up|clean up|split|extract|support|handle|build)\b",
    re.IGNORECASE,
)
"""A request with one of them asks for a change (English)."""
PLAIN_WORDS = frozenset("yes yeah yep ok okay sure please do it go ahead of course just proceed continue".split())
"""An answer of nothing else gives no information (English)."""
INVALID_CALLS = ("invalid_arguments", "unknown_tool")
EXCUSED_ERRORS = ("provider", "environment", "aborted", "unknown")
"""Errors that the policy did not cause; "unknown" is a bug of the harness and raises an alert. A call that runs into
the timeout of its tool is an act of the policy."""
NO_TEXT = "no reader of the conversation's text"
NOT_STORED = "a follow-up whose text is not stored"


def follow_up(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns the mean of -1, 0, +1 over the answers that a user's message followed, or that the user undid.

    The last answer, which no message follows, counts +1 with a later commit (of any lines: a diff may only delete) or
    kept edits and is left out otherwise. A session in which nothing counts has 0. See judge.py.
    """
    turns, reasons = continued_turns(traffic), []
    votes = {answer: -1.0 for answer, seconds in delays(traffic, "undo", "regenerate") if seconds <= QUICK_S}
    replies = _replies(traffic, turns, context.text)
    unknown = _named_answers(traffic) - replies.keys()
    if context.text is None and len(turns) > 1:
        reasons.append(NO_TEXT)
    elif unknown - votes.keys() - _left_answers(traffic, turns):
        reasons.append(NOT_STORED)
    if context.text:
        reasons += _judge_replies(turns, replies, votes, context.text, context.judge)
    last = turns[-1].answer if turns else None
    if last and last not in votes and not reasons and _is_kept(traffic, turns[-1], horizon, context):
        votes[last] = 1.0
    reasons = list(dict.fromkeys(reasons))
    if votes:
        return observed(math.fsum(votes.values()) / len(votes), context.judge.version, *reasons, by_turn=votes)
    return censored(*reasons) if reasons else observed(0.0, "no follow-up")


def _judge_replies(
    turns: Sequence[SampledTurn],
    replies: Mapping[str, str],
    votes: dict[str, float],
    text: ConversationText,
    judge: FollowUpJudge,
) -> list[str]:
    """Adds the judge's votes for answers without one; returns why there are none for some."""
    earlier: list[str] = []
    reasons: list[str] = []
    for turn in turns:
        earlier += [message] if (message := text.user(turn.suffix)) else []
        if turn.answer in replies and turn.answer not in votes:
            said = text.answer(turn.tokens)[0]
            follow_up = FollowUp(replies[turn.answer], tuple(earlier), said, turn.has_secret)
            try:
                votes[turn.answer] = float(judge.vote(follow_up))
            except JudgeError as error:
                reasons.append(str(error))
    return reasons


def _replies(traffic: SessionTraffic, turns: Sequence[SampledTurn], text: ConversationText | None) -> dict[str, str]:
    """Returns answer -> the user's message after it. turns: the continued ones.

    The message is new in the prompt of the answer's child. A root repeats messages: after a summary its last one may be
    the harness's, and otherwise it counts if it was not there before, or if an event says that it follows the answer.
    """
    replies: dict[str, str] = {}
    if text is None:
        return replies
    named = _named_answers(traffic)
    summaries = [turn.time for turn in traffic.turns if turn.kind == "summary"]
    messages = [text.user(turn.suffix) for turn in turns]
    for i, (turn, following) in enumerate(zip(turns, turns[1:], strict=False)):
        message = messages[i + 1]
        is_summarized = any(turn.time < time <= following.time for time in summaries)
        is_new = following.parent or turn.answer in named or (message not in messages[: i + 1] and not is_summarized)
        if message is not None and is_new:
            replies[turn.answer] = message
    return replies


def _named_answers(traffic: SessionTraffic) -> set[str]:
    """Returns the answers that a message followed, as events say; an event need not name one."""
    return {event.turn for event in events_of(traffic, "follow_up") if event.turn}


def _left_answers(traffic: SessionTraffic, turns: Sequence[SampledTurn]) -> set[str]:
    """Returns the answers with which the user did not go on. turns: the continued ones."""
    return {turn.answer for turn in main_turns(traffic)} - {turn.answer for turn in turns}


def _is_kept(traffic: SessionTraffic, last: SampledTurn, horizon: float, context: LabelContext) -> bool:
    is_committed = any(event.time >= last.time for event in events_of(traffic, "commit"))
    return is_committed or (keep(traffic, horizon, context).value or 0.0) >= KEPT_SHARE


def question(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns 1 if the user asked for a change, an answer ends with a question, and no line was edited; else 0."""
    turns = continued_turns(traffic)
    if context.text is None:
        return censored(NO_TEXT)
    if not turns:
        return undefined("no answer")
    edits, hunks = edited(traffic, horizon, context), events_of(traffic, "shown", "accepted", "rejected")
    if edits.value is None and not hunks:
        return censored(*edits.reasons)
    if request_kind(turns, context.text) != "change":
        return undefined("no change was asked for")
    if edits.value or hunks:
        return observed(0.0)
    questions = {turn.answer: 1.0 for turn in turns if is_question(context.text.answer(turn.tokens)[0])}
    return observed(bool(questions), by_turn=questions)


def needless_question(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns 1 if the user answered a question instead of work without any information, such as "yes"; else 0."""
    questions = question(traffic, horizon, context)
    if context.text is None or not questions.by_turn:
        return questions
    replies = _replies(traffic, continued_turns(traffic), context.text)
    unknown = _named_answers(traffic) - replies.keys()
    hits = {
        answer: 1.0
        for answer in questions.by_turn
        if answer in replies and not set(re.findall(r"\w+", replies[answer].lower())) - PLAIN_WORDS
    }
    if not hits and unknown & questions.by_turn.keys():
        return censored(NOT_STORED)
    return observed(bool(hits), by_turn=hits)


def is_question(text: str) -> bool:
    """Whether a message ends with a question."""
    return text.rstrip().rstrip("*_`\"')").endswith(("?", "？"))


def request_kind(turns: Sequence[SampledTurn], text: ConversationText | None) -> str:
    """Returns what the user's first message asks for: change | question | other, or unknown without a text."""
    messages = (text.user(turn.suffix) for turn in turns) if text else ()
    first = next((message for message in messages if message), None)
    if first is None:
        return "unknown"
    if CHANGE_WORDS.search(first):
        return "change"
    return "question" if is_question(first) else "other"


def invalid_calls(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns calls that no tool could execute / calls. Errors of provider and environment are in neither count.

    It has the parts of single answers where every error names one.
    """
    if not is_reported(traffic, "tool_error"):
        return censored(NO_CLIENT)
    turns = continued_turns(traffic)
    left = _left_answers(traffic, turns)
    events = [event for event in events_of(traffic, "tool_error") if event.turn not in left]
    errors = [event.payload["error"] for event in events]
    invalid, excused = (sum(error in kinds for error in errors) for kinds in (INVALID_CALLS, EXCUSED_ERRORS))
    alerts = (f"alert: {unknown} errors of an unknown class",) if (unknown := errors.count("unknown")) else ()
    total = calls(traffic, horizon, context)
    if total.value is None:
        return censored(*total.reasons, *alerts)
    valid_base = max(total.value - excused, invalid)
    if not valid_base:
        return undefined("no calls", *alerts)
    by_turn = _invalid_by_answer(turns, events, context.text) if context.text and invalid else {}
    return observed(invalid / valid_base, *alerts, by_turn=by_turn)


def _invalid_by_answer(
    turns: Sequence[SampledTurn], errors: Sequence[Event], text: ConversationText
) -> dict[str, float]:
    """Returns answer -> its share of invalid calls, of those with calls; nothing if an error names no answer."""
    total: dict[str, int] = {}
    for turn in turns:
        total[turn.answer] = total.get(turn.answer, 0) + text.answer(turn.tokens)[1]
    if any(event.turn not in total for event in errors):
        return {}
    shares = {}
    for answer, calls_made in total.items():
        of_answer = [event.payload["error"] for event in errors if event.turn == answer]
        invalid = sum(error in INVALID_CALLS for error in of_answer)
        valid_base = max(calls_made - sum(error in EXCUSED_ERRORS for error in of_answer), invalid)
        if valid_base:
            shares[answer] = invalid / valid_base
    return shares


def calls(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns the number of tool calls of the session."""
    if context.text is None:
        return censored(NO_TEXT)
    return observed(sum(context.text.answer(turn.tokens)[1] for turn in continued_turns(traffic)))


def seconds(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns the seconds for which the user waited for the answers that were continued, summaries included."""
    return _total(traffic, lambda turn: turn.seconds)


def tokens(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns the number of sampled tokens of the answers that were continued, summaries included."""
    return _total(traffic, lambda turn: len(turn.tokens))


def _total(traffic: SessionTraffic, cost: Callable[[SampledTurn], float]) -> Signal:
    turns = [*continued_turns(traffic), *(turn for turn in traffic.turns if turn.kind == "summary")]
    return observed(sum(map(cost, turns))) if turns else undefined("no answer")


def thumb(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns the user's last verdict by hand, -1 or +1."""
    by_turn = {event.turn: float(event.payload["value"]) for event in events_of(traffic, "thumb")}
    if not by_turn:
        return undefined("no verdict") if is_reported(traffic, "thumb") else censored(NO_CLIENT)
    return observed(events_of(traffic, "thumb")[-1].payload["value"], by_turn=by_turn)


def regenerate(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns 1 if the user asked for another answer in place of one, else 0."""
    return _happened(traffic, "regenerate")


def stop_pressed(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns 1 if the user cut an answer, else 0."""
    return _happened(traffic, "stop_pressed")


def _happened(traffic: SessionTraffic, kind: EventKind) -> Signal:
    if not is_reported(traffic, kind):
        return censored(NO_CLIENT)
    by_turn = {answer: 1.0 for answer, _ in delays(traffic, kind)}
    return observed(bool(events_of(traffic, kind)), by_turn=by_turn)
