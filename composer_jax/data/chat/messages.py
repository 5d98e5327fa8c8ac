"""Messages of the model and the tool calls in them, and the JSON that a model writes."""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

_NAME = re.compile(r"[A-Za-z0-9_.-]+")  # OpenAI's, and the dots of other APIs; of any length


THINKING = ("<think>", "</think>")
"""Markers around what a model thinks. Templates look for them in the content of its messages."""


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
    """A message of the model. `complete` is False when it was cut off before its end token.

    Where a format tells thinking from the rest (ChatFormat.reads_thinking), content with thinking is `<think>`, a line
    break, the thinking, a line break, `</think>`, an empty line, the rest.
    """

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


def read_json(text: str, what: str, *, strict: bool = True) -> Any:
    """Parses JSON that a model wrote. `what` names the text; without `strict`, strings may hold line breaks and tabs.

    Raises ValueError with a reason for the model.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_number, parse_float=_finite, strict=strict)
        compact_json(value).encode("utf-8")  # a lone surrogate could not be written to a file
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} are not JSON: {error.msg} at character {error.pos}") from error
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} hold {lone_surrogate(error)}") from error
    except RecursionError as error:
        raise ValueError(f"{what} are nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{what} are not JSON: {error}") from error
    return value


def lone_surrogate(error: UnicodeEncodeError) -> str:
    """Names a character that UTF-8 does not have, by its code and the text before it."""
    code, before = ord(error.object[error.start]), error.object[max(0, error.start - 30) : error.start]
    return f"half of a surrogate pair (the lone surrogate U+{code:04X} after {before!r})"


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse_number(digits)


def _refuse_number(digits: str) -> float:
    raise ValueError(f"{digits[:40]} is not a number JSON can hold")


def join_content(before: str, after: str) -> str:
    """Joins the text before and after the calls of a message; white space after them is dropped."""
    return "\n".join(part for part in (before, after.strip()) if part)
