"""Splits a sampled message into content and tool calls by the control tokens around the calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CallTokens:
    """Control tokens of a format's calls."""

    begin: int
    """Begins a call."""
    finish: int
    """Finishes a call."""
    ends: frozenset[int]
    """Each ends the message."""
    around: frozenset[int] = frozenset()
    """Enclose all calls of a message; without meaning by themselves."""


@dataclass
class CallSpan:
    """One call."""

    ids: list[int] = field(default_factory=list)
    """Ids between the control tokens of the call."""
    closed: bool = False
    """Whether the control token that finishes the call was there."""


@dataclass
class ScannedMessage:
    """A message in parts."""

    before: list[int] = field(default_factory=list)
    """Ids before the first control token of a call."""
    after: list[int] = field(default_factory=list)
    """Later ids outside of calls."""
    calls: list[CallSpan] = field(default_factory=list)
    complete: bool = False
    """Whether the message has an end token."""


def scan_calls(ids: Iterable[int], control: CallTokens) -> ScannedMessage:
    """Splits any ids into parts. The beginning of another call, and the end of the message, leave a call not closed."""
    message = ScannedMessage()
    outside = message.before
    call: CallSpan | None = None
    for i in ids:
        if i in control.ends:
            message.complete = True
            break
        if i == control.begin:
            call = CallSpan()
            message.calls.append(call)
        elif i == control.finish:
            if call is not None:
                call.closed = True
            call = None
        elif i in control.around:
            call = None
        else:
            (outside if call is None else call.ids).append(i)
            continue
        outside = message.after
    return message


def join_content(before: str, after: str) -> str:
    """Joins the text before and after the calls of a message; white space after them is dropped."""
    return "\n".join(part for part in (before, after.strip()) if part)
