"""Messages of the model and the tool calls in them: their JSON, and where they are among sampled ids."""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class ToolCall:
    """A well-formed call: a tool's name and its arguments (a JSON object). The tool need not exist."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class MalformedToolCall:
    """A call that could not be parsed: the model's text, and the reason in words for the model."""

    text: str
    reason: str


@dataclass(frozen=True)
class AssistantMessage:
    """A message of the model. `complete` is False when it was cut off before <|end|>."""

    content: str
    calls: tuple[ToolCall | MalformedToolCall, ...]
    complete: bool


def compact_json(value: Any) -> str:
    """Returns JSON without spaces and needless escapes. Raises ValueError for NaN and infinity."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def is_tool_name(name: str) -> bool:
    """Whether this can be the name of a tool."""
    return _NAME.fullmatch(name) is not None


def check_call(call: ToolCall) -> None:
    """Raises ValueError for a call that no format could parse: a bad name, arguments that JSON cannot hold."""
    if not is_tool_name(call.name):
        raise ValueError(f"{call.name!r} is not a tool name: use letters, digits, '_', '.' and '-'")
    compact_json(call.arguments)


def read_json(text: str, what: str) -> Any:
    """Parses JSON that a model wrote. Raises ValueError with a reason for the model; `what` names the text."""
    try:
        value = json.loads(text, parse_constant=_refuse_number, parse_float=_finite)
        compact_json(value).encode("utf-8")  # a lone surrogate could not be written to a file
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} are not JSON: {error.msg} at character {error.pos}") from error
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} hold half of a surrogate pair") from error
    except RecursionError as error:
        raise ValueError(f"{what} are nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{what} are not JSON: {error}") from error
    return value


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse_number(digits)


def _refuse_number(digits: str) -> float:
    raise ValueError(f"{digits[:40]} is not a number JSON can hold")


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
