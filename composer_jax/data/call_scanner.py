"""Finds the calls in a sampled message by the control tokens around them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CallTokens:
    """The control tokens of a format: what begins and finishes a call, what ends a message, and what is written
    around all calls of a message and means nothing by itself."""

    begin: int
    finish: int
    end: int
    around: frozenset[int] = frozenset()


@dataclass
class CallSpan:
    """The ids of one call, without its marks. closed: whether the mark that finishes it was there."""

    ids: list[int] = field(default_factory=list)
    closed: bool = False


@dataclass
class ScannedMessage:
    """A message in parts. before: ids until the first mark; after: ids outside of calls from then on."""

    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    calls: list[CallSpan] = field(default_factory=list)
    complete: bool = False


def scan_calls(ids: Iterable[int], marks: CallTokens) -> ScannedMessage:
    """Takes any ids apart; a call is also finished, but not closed, by the begin of another and by what ends it all."""
    found = ScannedMessage()
    outside = found.before
    call: CallSpan | None = None
    for i in ids:
        if i == marks.end:
            found.complete = True
            break
        if i == marks.begin:
            call = CallSpan()
            found.calls.append(call)
        elif i == marks.finish:
            if call is not None:
                call.closed = True
            call = None
        elif i in marks.around:
            call = None
        else:
            (outside if call is None else call.ids).append(i)
            continue
        outside = found.after
    return found


def join_content(before: str, after: str) -> str:
    """The content of a message whose text may go on after its calls; white space there says nothing."""
    return "\n".join(part for part in (before, after.strip()) if part)
