"""How model families write tool calls: the markers around a call, and what stands between them.

    JSON    <tool_call> {"name": NAME, "arguments": {...}} </tool_call>               Hermes, Qwen2.5, Qwen3
    XML     <tool_call> <function=NAME> <parameter=KEY> VALUE </parameter> </function> </tool_call>
                                                                                     Qwen3-Coder, Qwen3.5, Nemotron 3
    KEYS    <tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> </tool_call>   GLM-4.5, 4.6

XML and KEYS write strings without quotes and other values as JSON. The schema of the tool says which one a value is.
Without a schema, a value that is JSON of another type than a string is that, and everything else is a string.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol

from composer_jax.data.chat.messages import THINKING, MalformedToolCall, ToolCall, is_tool_name, read_json
from composer_jax.data.chat.sampled_text import CallSpan, SampledText

CALL = ("<tool_call>", "</tool_call>")
"""The markers around a call: control tokens where the tokenizer has them, else ordinary text."""
ANSWER = ("<tool_response>", "</tool_response>")
"""The markers around the answer to a call."""

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the arguments by the name of the tool."""


class HasSchema(Protocol):
    """What `schemas_of` reads of a tool (chat_format.ToolSpec)."""

    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, Any]: ...


def schemas_of(tools: Iterable[HasSchema]) -> Schemas:
    """Returns the schemas by which a form reads the arguments of calls to these tools."""
    return {tool.name: tool.parameters for tool in tools}


class CallForm(ABC):
    """A way to write calls. `begin` and `finish` enclose one call, `around` all calls of a message."""

    begin, finish = CALL
    around: ClassVar[tuple[str, ...]] = ()
    inner: ClassVar[tuple[str, ...]] = ()
    """Beginnings of markers inside a call, which may be control tokens."""

    @abstractmethod
    def body_end(self, text: SampledText, start: int) -> int:
        """Returns where the arguments of the call that begins at `start` end; `start` if they cannot be read.

        A marker before that place stands in an argument and ends nothing.
        """

    @abstractmethod
    def read(self, body: SampledText, schemas: Schemas) -> ToolCall | MalformedToolCall:
        """Parses what stands between the markers."""


class JsonCalls(CallForm):
    """A JSON object with name and arguments. Missing, null and empty arguments are none; other keys are ignored."""

    def body_end(self, text: SampledText, start: int) -> int:
        begin = start + len(text.text[start:]) - len(text.text[start:].lstrip())
        try:
            return json.JSONDecoder(strict=False).raw_decode(text.text, begin)[1]
        except (ValueError, RecursionError):  # `read` says what is wrong
            return start

    def read(self, body: SampledText, schemas: Schemas) -> ToolCall | MalformedToolCall:
        try:
            value = read_json(body.text, "the name and arguments", strict=False)
        except ValueError as error:
            return MalformedToolCall(body.text, str(error))
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            reason = 'a call is a JSON object, like {"name": "tool", "arguments": {"key": "value"}}'
            return MalformedToolCall(body.text, reason)
        return read_arguments(body.text, value["name"], value.get("arguments", value.get("parameters")))


class XmlCalls(CallForm):
    """A function with parameters, each with its value on lines of its own."""

    inner = ("<function", "</function", "<parameter", "</parameter")
    _HEAD = re.compile(r"\s*<function=([^>\n]*)>")
    _PARAMETER = re.compile(
        r"\s*<parameter=(?P<key>[^>\n]*)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL
    )
    _TAIL = re.compile(r"\s*</function>")

    def body_end(self, text: SampledText, start: int) -> int:
        parsed = self._parse(text.text, start)
        return start if parsed is None else parsed[2]

    def read(self, body: SampledText, schemas: Schemas) -> ToolCall | MalformedToolCall:
        parsed = self._parse(body.text, 0)
        if parsed is None or body.text[parsed[2] :].strip():
            reason = (
                "a call is <function=NAME>, then <parameter=KEY>, VALUE and </parameter> for each, then </function>"
            )
            return MalformedToolCall(body.text, reason)
        return _read_pairs(body.text, *parsed[:2], schemas)

    def _parse(self, text: str, at: int) -> tuple[str, list[tuple[str, str]], int] | None:
        head = self._HEAD.match(text, at)
        pairs: list[tuple[str, str]] = []
        at = head.end() if head else at
        while head and (parameter := self._PARAMETER.match(text, at)):
            pairs.append((parameter["key"].strip(), parameter["value"]))
            at = parameter.end()
        tail = self._TAIL.match(text, at)
        return (head[1].strip(), pairs, tail.end()) if head and tail else None


class KeyValueCalls(CallForm):
    """A name, then keys and values between markers of their own."""

    inner = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def body_end(self, text: SampledText, start: int) -> int:
        begin = text.find(CALL[0], start)
        end = text.find("</arg_value>", start)
        while end >= 0:
            after = end + len("</arg_value>")
            following = text.text[after:].lstrip()
            if not following.startswith("<arg_key>"):
                return start if 0 <= begin < text.find("<arg_key>", start) else after
            end = text.find("</arg_value>", after)
        return start

    def read(self, body: SampledText, schemas: Schemas) -> ToolCall | MalformedToolCall:
        name_end = body.find("<arg_key>")
        name, at = (body.text, len(body.text)) if name_end < 0 else (body.text[:name_end], name_end)
        pairs: list[tuple[str, str]] = []
        while at < len(body.text) and body.text[at:].strip():
            parts, at = self._pair(body, at)
            if parts is None:
                reason = (
                    "a call is a name, then <arg_key>KEY</arg_key> and <arg_value>VALUE</arg_value> for each argument"
                )
                return MalformedToolCall(body.text, reason)
            pairs.append(parts)
        return _read_pairs(body.text, name.strip(), pairs, schemas)

    def _pair(self, body: SampledText, at: int) -> tuple[tuple[str, str] | None, int]:
        """Returns (key and value, where they end); None for something else."""
        parts = []
        for mark in ("arg_key", "arg_value"):
            begin, end = f"<{mark}>", f"</{mark}>"
            start = body.find(begin, at)
            stop = body.find(end, start)
            if start < 0 or stop < 0 or body.text[at:start].strip():
                return None, at
            parts.append(body.text[start + len(begin) : stop])
            at = stop + len(end)
        return (parts[0], parts[1]), at


JSON = JsonCalls()
FORMS: tuple[CallForm, ...] = (JSON, XmlCalls(), KeyValueCalls())
"""All forms. The words of a template say which one is its own."""


def read_call(span: CallSpan, form: CallForm, schemas: Schemas) -> ToolCall | MalformedToolCall:
    """Parses a call. Markers of calls and of thinking may stand in its arguments; other control tokens may not."""
    text = span.body.text
    if not span.closed:
        return MalformedToolCall(text, f"the call does not end with {form.finish}")
    allowed = (*THINKING, form.begin, form.finish, *form.around, *form.inner)
    if not all(name.startswith(allowed) for _, name in span.body.controls):
        return MalformedToolCall(text, "a control token is inside the call")
    return form.read(span.body, schemas)


def read_arguments(text: str, name: str, arguments: Any) -> ToolCall | MalformedToolCall:
    """Returns the call of a tool with arguments from JSON; `text` is what the model wrote.

    Missing, null and empty arguments are an empty object, and a string of JSON is what it holds.
    """
    if not is_tool_name(name):
        return MalformedToolCall(text, f"{name!r} is not a tool name")
    if arguments is None or arguments == "":
        return ToolCall(name, {})
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments, "the arguments", strict=False)
        except ValueError as error:
            return MalformedToolCall(text, str(error))
    if not isinstance(arguments, dict):
        return MalformedToolCall(text, "the arguments are not a JSON object")
    return ToolCall(name, arguments)


def _read_pairs(
    text: str, name: str, pairs: Iterable[tuple[str, str]], schemas: Schemas
) -> ToolCall | MalformedToolCall:
    properties = schemas.get(name, {}).get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    arguments: dict[str, Any] = {}
    for key, value in pairs:
        if not key or key in arguments:
            return MalformedToolCall(text, f"the argument {key!r} comes twice" if key else "an argument has no name")
        arguments[key] = _typed(value, properties.get(key))
    return read_arguments(text, name, arguments)


_PYTHON = {"True": True, "False": False, "None": None}  # as templates write them that do not use JSON here


def _typed(text: str, schema: Any) -> Any:
    """The value of an argument that is written without quotes."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = [kinds] if isinstance(kinds, str) else kinds or []
    if "string" in kinds and not (set(kinds) - {"string"} and text.strip() in {"null", "None"}):
        return text
    if text.strip() in _PYTHON:
        return _PYTHON[text.strip()]
    try:
        value = read_json(text, "the value")
    except ValueError:
        return text
    return text if isinstance(value, str) else value
