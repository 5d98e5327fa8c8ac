"""Signals of the conversation: the user's next message, questions instead of work, calls, cost, explicit verdicts."""

import re
from collections.abc import Sequence

from composer_jax.realtime.labels.edits import NO_CLIENT, delays, edited, keep
from composer_jax.realtime.labels.judge import QUICK_S, FollowUp, JudgeError
from composer_jax.realtime.labels.signal_types import (
    ConversationText,
    LabelContext,
    Signal,
    censored,
    observed,
    undefined,
)
from composer_jax.realtime.labels.window import events_of, main_turns
from composer_jax.serve.traffic.records import SampledTurn, SessionTraffic

KEPT = 0.5
"""Share of kept lines from which an edit counts as kept, where the user said nothing."""
NEW_WORDS = 2
"""An answer to a question gives no new information if it has at most so many words that were not said before."""
CHANGE_WORDS = re.compile(
    r"\b(add|change|fix|implement|refactor|rename|remove|delete|write|create|update|make|move|replace|convert|port"
    r"|migrate|optimi[sz]e|speed up|clean up|split|extract|support|handle|build)\b",
    re.IGNORECASE,
)
"""A request with one of them asks for a change (English)."""
PLAIN_WORDS = frozenset("yes yeah yep ok okay sure please do it go ahead of course just proceed continue".split())
INVALID = ("invalid_arguments", "unknown_tool")
MASKED = ("provider", "environment", "timeout", "aborted", "unknown")
"""Classes of errors that are no act of the policy; "unknown" is a bug of the harness and raises an alert."""
NO_TEXT = "no reader of the conversation's text"


def follow_up(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns the mean of -1, 0, +1 over the answers that a user's message followed or undid; see judge.py.

    The last answer, which no message follows, counts +1 with a commit or kept edits and is left out otherwise. A
    session in which nothing counts has 0.
    """
    if not traffic.events:
        return censored(NO_CLIENT)
    turns, votes, reasons = main_turns(traffic), {}, []
    quick = {answer for answer, seconds in delays(traffic, "undo", "regenerate") if seconds <= QUICK_S}
    for answer in dict.fromkeys(event.turn for event in events_of(traffic, "follow_up")):
        vote = _vote(answer, turns, answer in quick, context)
        if isinstance(vote, str):
            reasons.append(vote)
        else:
            votes[answer] = float(vote)
    if reasons:
        return censored(*dict.fromkeys(reasons))
    votes |= dict.fromkeys(quick - votes.keys(), -1.0)
    if turns and turns[-1].answer not in votes and _is_kept(traffic, horizon, context):
        votes[turns[-1].answer] = 1.0
    if not votes:
        return observed(0.0, "no follow-up")
    return observed(sum(votes.values()) / len(votes), context.judge.version, by_turn=votes)


def _vote(answer: str, turns: Sequence[SampledTurn], undone: bool, context: LabelContext) -> int | str:
    """Returns the judge's vote on the message after an answer, or why there is none."""
    if undone:
        return -1
    if context.text is None:
        return NO_TEXT
    answered = next((turn for turn in turns if turn.answer == answer), None)
    following = answered and _next_turn(answered, turns)
    if answered is None or following is None:
        return "the turn of the follow-up is not stored"
    text = context.text.user(following.suffix)
    if text is None:
        return "the turn of the follow-up holds no message of a user"
    before = (context.text.user(turn.suffix) for turn in turns[: turns.index(following)])
    earlier = [message for message in before if message]
    try:
        return context.judge.vote(FollowUp(text, earlier, context.text.answer(answered.tokens)[0], undone))
    except JudgeError as error:
        return str(error)


def _next_turn(answered: SampledTurn, turns: Sequence[SampledTurn]) -> SampledTurn | None:
    """Returns the turn that continues an answer: a child, or the next root where the client edited the history."""
    after = turns[turns.index(answered) + 1 :]
    children = (turn for turn in after if turn.parent == answered.id)
    return next(children, None) or next((turn for turn in after if not turn.parent), None)


def _is_kept(traffic: SessionTraffic, horizon: float, context: LabelContext) -> bool:
    return bool(events_of(traffic, "commit")) or (keep(traffic, horizon, context).value or 0.0) >= KEPT


def question(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns 1 if the user asked for a change, an answer ends with a question, and no line was edited; else 0."""
    turns = main_turns(traffic)
    if context.text is None:
        return censored(NO_TEXT)
    if not turns:
        return undefined("no answer")
    made_edits = edited(traffic, horizon, context)
    if made_edits.value is None and not events_of(traffic, "shown"):
        return censored(*made_edits.reasons)
    if request_kind(turns, context.text) != "change":
        return undefined("no change was asked for")
    if made_edits.value or events_of(traffic, "accepted"):
        return observed(0.0)
    asked = {turn.answer: 1.0 for turn in turns if is_question(context.text.answer(turn.tokens)[0])}
    return observed(bool(asked), by_turn=asked)


def needless_question(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns 1 if a question instead of work got an answer without new information, such as "yes"; else 0.

    This one has a price, so that a question that the user had to answer costs nothing.
    """
    asked = question(traffic, horizon, context)
    if context.text is None or not asked.by_turn:
        return asked
    turns, hits = main_turns(traffic), {}
    for answered in (turn for turn in turns if turn.answer in asked.by_turn):
        following = _next_turn(answered, turns)
        reply = context.text.user(following.suffix) if following else None
        known = [context.text.user(turn.suffix) or "" for turn in turns[: turns.index(answered) + 1]]
        if reply is not None and not _is_new(reply, [*known, context.text.answer(answered.tokens)[0]]):
            hits[answered.answer] = 1.0
    return observed(bool(hits), by_turn=hits)


def _is_new(text: str, known: Sequence[str]) -> bool:
    words = {word for message in known for word in re.findall(r"\w+", message.lower())}
    return len(set(re.findall(r"\w+", text.lower())) - words - PLAIN_WORDS) > NEW_WORDS


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
    """Returns calls that no tool could execute / calls. Errors of provider and environment are in neither count."""
    if not traffic.events:
        return censored(NO_CLIENT)
    errors = [event.payload["error"] for event in events_of(traffic, "tool_error")]
    invalid, masked = (sum(error in kinds for error in errors) for kinds in (INVALID, MASKED))
    alerts = (f"alert: {unknown} errors of an unknown class",) if (unknown := errors.count("unknown")) else ()
    total = calls(traffic, horizon, context)
    if total.value is None:
        return censored(*total.reasons, *alerts)
    valid_base = max(total.value - masked, invalid)
    if not valid_base:
        return undefined("no calls", *alerts)
    return observed(invalid / valid_base, *alerts)


def calls(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns the number of tool calls of the session."""
    if context.text is None:
        return censored(NO_TEXT)
    return observed(sum(context.text.answer(turn.tokens)[1] for turn in main_turns(traffic)))


def seconds(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns the seconds for which the user waited for the model, all turns together."""
    return observed(sum(turn.seconds for turn in traffic.turns)) if traffic.turns else undefined("no answer")


def tokens(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns the number of sampled tokens, summaries included."""
    return observed(sum(len(turn.tokens) for turn in traffic.turns)) if traffic.turns else undefined("no answer")


def thumb(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns the user's last verdict by hand, -1 or +1."""
    by_turn = {event.turn: float(event.payload["value"]) for event in events_of(traffic, "thumb")}
    if not by_turn:
        return undefined("no verdict") if traffic.events else censored(NO_CLIENT)
    return observed(events_of(traffic, "thumb")[-1].payload["value"], by_turn=by_turn)


def regenerate(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns 1 if the user asked for another answer in place of one, else 0."""
    return _happened(traffic, "regenerate")


def stop_pressed(traffic: SessionTraffic, horizon: float, context: LabelContext) -> Signal:
    """Returns 1 if the user cut an answer, else 0."""
    return _happened(traffic, "stop_pressed")


def _happened(traffic: SessionTraffic, kind: str) -> Signal:
    if not traffic.events:
        return censored(NO_CLIENT)
    by_turn = {answer: 1.0 for answer, _ in delays(traffic, kind)}
    return observed(bool(events_of(traffic, kind)), by_turn=by_turn)
