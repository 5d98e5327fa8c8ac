"""The fields of a message in OpenAI's form: each is read, changes nothing, or is refused by name.

A field that is absent, null or empty says nothing: tables (Parquet) give every message all fields of all messages.
"""

from collections.abc import Mapping
from typing import Any, Literal

from composer_jax.data.chat.messages import (
    MalformedToolCall,
    ToolCall,
    check_call,
    compact_json,
    lone_surrogate,
    read_json,
)
from composer_jax.data.chat.thinking import join_thinking

ROLES = ("system", "user", "assistant", "tool")
OTHER_ROLES = {"developer": "system", "function": "tool"}
"""OpenAI's newer and older names of roles."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of what a model thought: of DeepSeek and vLLM, of OpenRouter and newer vLLM, of gpt-oss."""
READ_FIELDS: Mapping[str, tuple[str, ...]] = {
    "system": ("content",),
    "user": ("content", "token_ids"),
    "assistant": ("content", *REASONING, "tool_calls", "function_call", "train", "token_ids"),
    "tool": ("content", "tool_call_id"),
}
"""Beside `role`, and `weight`, which OpenAI reads in messages of the model only."""
HARMLESS_FIELDS = frozenset(
    "annotations cache_control created created_at date extra finish_reason id index language message_id metadata model "
    "name object parent_id provider_specific_fields source status stop_reason store timestamp type usage".split()
)
"""Fields that change neither an answer nor a loss: who wrote a message, when, where and at which price."""
HARMLESS_OF_PARTS = frozenset({"annotations", "cache_control", "logprobs"})
HARMLESS_OF_CALLS = frozenset({"extra_content", "index", "provider_specific_fields"})
HARMLESS_OF_TOOLS = frozenset(
    "annotations cache_control defer_loading id output_schema response return returns strict title type".split()
)
"""No chat format here declares what a tool returns."""
TEXT_PARTS = ("text", "input_text", "output_text")
DEEPEST = 100
"""Levels of nested values in arguments and declarations."""


def read_role(message: Any) -> Literal["system", "user", "assistant", "tool"]:
    """Returns the role of a message, one of ROLES. Raises ValueError for another, and for a field that is not read."""
    given = message.get("role") if isinstance(message, dict) else None
    role: Any = OTHER_ROLES.get(given, given) if isinstance(given, str) else given
    if role not in ROLES:
        raise ValueError(f"{given!r} is not a role; use {', '.join(ROLES)}")
    check_fields(message, ("role", "weight", *READ_FIELDS[role]), HARMLESS_FIELDS, f"a message of the {role}")
    return role


def check_fields(value: Mapping[str, Any], read: tuple[str, ...], harmless: frozenset[str], place: str) -> None:
    """Raises ValueError for a field with a value that is neither read nor harmless."""
    for name, inner in value.items():
        if inner and name not in read and name not in harmless:
            raise ValueError(f"the field {name!r} of {place} is not read; remove it, or write what it says elsewhere")


def read_content(message: Mapping[str, Any]) -> str | None:
    """Returns the text of a message, which may be in parts; None without any."""
    content = message.get("content")
    if content in (None, []):
        return None
    parts: list[Any] = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            of_kind = "" if kind is None or kind in TEXT_PARTS else f" (a part is of the type {kind!r})"
            raise ValueError(f"its content is not text{of_kind}; images and other parts cannot be read")
        check_fields(part, ("type", "text"), HARMLESS_OF_PARTS, "its content")
        texts.append(part["text"])
    text = "".join(texts)
    _check_unicode(text, "its content holds")
    return text


def read_said(message: Mapping[str, Any]) -> str:
    """Returns the content of a message of the model, which begins with what it thought."""
    content = read_content(message)
    given = {name: message[name] for name in REASONING if message.get(name)}
    for name, reasoning in given.items():
        if not isinstance(reasoning, str):
            raise ValueError(f"{name} is not a text")
        _check_unicode(reasoning, f"{name} holds")
    thoughts = {name: reasoning.strip("\n") for name, reasoning in given.items() if reasoning.strip()}
    if not thoughts:
        return content or ""
    (name, reasoning), *others = thoughts.items()
    for other, text in others:
        if text != reasoning:
            raise ValueError(f"{name} and {other} differ; keep one of them")
    try:
        return join_thinking(reasoning, content or "")
    except ValueError as error:
        raise ValueError(f"{name} {error}") from error


def read_trained(message: Mapping[str, Any]) -> bool:
    """Returns whether a message of the model is trained: its `train`, its `weight` (OpenAI), else True."""
    train, weight = message.get("train"), message.get("weight")
    if train is not None and not isinstance(train, bool):
        raise ValueError(f"train={train!r} is neither true nor false")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise ValueError(f"weight={weight!r} is neither 0 nor 1; other weights cannot be applied")
    if train is not None and weight is not None and train != bool(weight):
        raise ValueError(f"weight={weight!r} and train={train!r} contradict each other; keep one of them")
    return bool(weight) if train is None and weight is not None else train is not False


def read_token_ids(message: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Returns the sampled ids of a message; None if it has none."""
    ids = message.get("token_ids")
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError("token_ids is not a list of token ids")
    return tuple(ids)


def read_calls(message: Mapping[str, Any]) -> list[tuple[str | None, ToolCall | MalformedToolCall]]:
    """Returns the calls of a message of the model, each after its id: tool_calls, or OpenAI's older function_call."""
    calls, legacy = parse_text(message.get("tool_calls"), "the calls") or [], message.get("function_call")
    if not isinstance(calls, list):
        raise ValueError("tool_calls is not a list")
    if legacy:
        if calls:
            raise ValueError("it has both tool_calls and function_call; keep one of them")
        calls = [legacy]
    return [_call(parse_text(call, f"call {place}"), place) for place, call in enumerate(calls, 1)]


def _call(call: Any, place: int) -> tuple[str | None, ToolCall | MalformedToolCall]:
    fields: dict[str, Any] = call if isinstance(call, dict) else {}
    if fields.get("type") == "malformed":
        check_fields(fields, ("id", "type", "text"), HARMLESS_OF_CALLS, f"call {place}")
        reason = "it was malformed when it was recorded"
        return fields.get("id"), MalformedToolCall(str(fields.get("text", "")), reason)
    if fields.get("type") not in (None, "", "function"):
        raise ValueError(f"call {place} has the type {fields['type']!r}; functions can be read")
    function = parse_text(fields.get("function"), f"the function of call {place}")
    if function is None:  # without a wrapper
        function = {name: value for name, value in fields.items() if name not in ("id", "type")}
    else:
        check_fields(fields, ("id", "type", "function"), HARMLESS_OF_CALLS, f"call {place}")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"call {place} has no function with a name")
    check_fields(function, ("name", "arguments"), HARMLESS_OF_CALLS, f"the function of call {place}")
    what = f"the arguments of call {place}"
    arguments = parse_text(function.get("arguments"), what)
    parsed = ToolCall(function["name"], {} if arguments is None else arguments)
    if not isinstance(parsed.arguments, dict):
        raise ValueError(f"{what} are not a JSON object")
    check_json(parsed.arguments, what)
    check_call(parsed)
    return fields.get("id"), parsed


def parse_text(value: Any, what: str) -> Any:
    """Parses a value that may be a text of JSON; an empty text is None. Raises ValueError; `what` names the value."""
    if not isinstance(value, str):
        return value
    return read_json(value, what) if value.strip() else None


def check_json(value: Any, what: str) -> None:
    """Raises ValueError for a value that JSON, or what renders it, cannot hold; `what` names it, in the plural."""
    try:
        check_depth(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} are nested deeper than {DEEPEST} levels") from error
    try:
        text = compact_json(value)
    except (TypeError, ValueError) as error:  # bytes and times of a table; infinity
        raise ValueError(f"{what} are not JSON: {error}") from error
    _check_unicode(text, f"{what} hold")


def check_depth(value: Any, most: int = DEEPEST) -> None:
    """Raises ValueError for a value that is nested deeper than what renders and writes it can follow."""
    if most < 0:
        raise ValueError("nested too deeply")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        check_depth(inner, most - 1)


def _check_unicode(text: str, what: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} {lone_surrogate(error)}") from error
