"""Messages of a conversation, and our own compact chat format in token ids.

    message   = role id, text, <|end|>
    assistant = <|assistant|>, text, then for each tool call <|call|>, name, JSON object, and at last <|end|>

Text is encoded once, when it enters the conversation; sampled tokens stay the ids that were sampled. Text cannot forge
a message, because only this module writes control tokens.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from composer_jax.data.tokenizer import SPECIAL, Tokenizer

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class ToolCall:
    """A well-formed call: a tool's name and its arguments (a JSON object). The tool need not exist."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Malformed:
    """A call that could not be parsed: the model's text, and the reason in words for the model."""

    text: str
    reason: str


@dataclass(frozen=True)
class AssistantMessage:
    """A message of the model. `complete` is False when it was cut off before <|end|>."""

    content: str
    calls: tuple[ToolCall | Malformed, ...]
    complete: bool


def render_message(tok: Tokenizer, role: str, text: str) -> list[int]:
    """Returns a whole message of `role` ("system", "user", "tool" or "assistant")."""
    return splice(tok, role, [text])


def render_assistant(tok: Tokenizer, content: str, calls: Iterable[ToolCall]) -> list[int]:
    """Returns the ids that a model would sample for this message: no leading role id, <|end|> included.

    Raises ValueError for a call that `parse_assistant` could not read back (a bad name, arguments that JSON cannot
    hold).
    """
    ids = tok.encode(content)
    for call in calls:
        check_call(call)
        ids += [tok.call, *tok.encode(call.name + compact_json(call.arguments))]
    return [*ids, tok.end]


def parse_assistant(tok: Tokenizer, ids: Iterable[int]) -> AssistantMessage:
    """Parses the output of `render_assistant`, or any other ids: bad calls become Malformed, nothing raises.

    The message ends at the first <|end|>; later ids are ignored. Other control tokens are shown by name in the content
    and make a call Malformed.
    """
    parts: list[list[int]] = [[]]
    complete = False
    for i in ids:
        if i == tok.end:
            complete = True
            break
        if i == tok.call:
            parts.append([])
        else:
            parts[-1].append(i)
    content, *bodies = parts
    return AssistantMessage(tok.decode(content), tuple(_parse_call(tok, body) for body in bodies), complete)


def splice(tok: Tokenizer, role: str, parts: Sequence[str | Sequence[int]]) -> list[int]:
    """Returns a message whose body mixes text with ids that were sampled earlier, such as a summary.

    The ids are kept, except for control tokens: a body can neither open nor close a message.
    """
    ids = [_role_id(tok, role)]
    for part in parts:
        ids += tok.encode(part) if isinstance(part, str) else [i for i in part if i >= len(SPECIAL)]
    return [*ids, tok.end]


def to_text(tok: Tokenizer, ids: Iterable[int]) -> str:
    """Returns any ids as text to read: control tokens by name, a line break after each message, no padding."""
    messages: list[list[int]] = [[]]
    for i in ids:
        if i != tok.pad:
            messages[-1].append(i)
        if i == tok.end:
            messages.append([])
    return "\n".join(tok.decode(message) for message in messages)


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


def _role_id(tok: Tokenizer, role: str) -> int:
    roles = {"system": tok.system, "user": tok.user, "assistant": tok.assistant, "tool": tok.tool}
    if role not in roles:
        raise ValueError(f"{role!r} is not a role; use one of {', '.join(roles)}")
    return roles[role]


def _parse_call(tok: Tokenizer, ids: list[int]) -> ToolCall | Malformed:
    text = tok.decode(ids)
    control = next((SPECIAL[i] for i in ids if 0 <= i < len(SPECIAL)), None)
    if control:
        return Malformed(text, f"the control token {control} is inside the call")
    name, brace, rest = text.partition("{")
    name = name.strip()
    if not brace:
        return Malformed(text, 'no arguments: a call is a name and a JSON object, like name{"key":"value"}')
    if not is_tool_name(name):
        return Malformed(text, f"{name!r} is not a tool name")
    try:
        return ToolCall(name, read_json(brace + rest, "the arguments"))
    except ValueError as error:
        return Malformed(text, str(error))


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
