"""How model families write tool calls: the markers around a call, and what stands between them.

    JSON    <tool_call> {"name": NAME, "arguments": {...}} </tool_call>               Hermes, Qwen2.5, Qwen3
    XML     <tool_call> <function=NAME> <parameter=KEY> VALUE </parameter> </function> </tool_call>
                                                                                     Qwen3-Coder, Qwen3.5, Nemotron 3
    KEYS    <tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> </tool_call>   GLM-4.5, 4.6

XML and KEYS write strings without quotes and other values as JSON. The schema of the tool says which one a value is.
Without a schema, a value that is JSON of another type than a string is that, and everything else is a string. A value
cannot hold another call that begins: a model that forgets to end a value spoils one call, not the next one.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from composer_jax.data.chat.chat_format import ToolSpec
from composer_jax.data.chat.messages import THINKING, MalformedToolCall, ToolCall, is_tool_name, read_json
from composer_jax.data.chat.sampled_text import CallSpan, SampledText

CALL = ("<tool_call>", "</tool_call>")
"""The markers around a call: control tokens where the tokenizer has them, else ordinary text."""
ANSWER = ("<tool_response>", "</tool_response>")
"""The markers around the answer to a call."""

Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> JSON schema of its arguments."""


def schemas_of(tools: Iterable[ToolSpec]) -> Schemas:
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

    def call_id(self, name: str, number: int) -> str:
        """Returns the id of a call, which some templates write. `number` counts the calls of the conversation."""
        return f"call{number:05d}"

    def written_id(self, body: SampledText) -> str | None:
        """Returns the id that the model wrote, which the answer must repeat; None in forms without ids."""
        return None

    @abstractmethod
    def read(self, body: SampledText, schemas: Schemas) -> ToolCall | MalformedToolCall:
        """Parses what stands between the markers."""


class JsonCalls(CallForm):
    """A JSON object with name and arguments. Missing, null and empty arguments are none; other keys are ignored."""

    def body_end(self, text: SampledText, start: int) -> int:
        begin = _after_space(text.text, start)
        if not text.text.startswith("{", begin):
            return start
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


class UnquotedCalls(CallForm):
    """Forms whose values have no quotes, so that only the beginning of another call shows that an end is missing."""

    @abstractmethod
    def _begins_body(self, text: SampledText, at: int) -> bool:
        """Whether a call that is well-formed so far is at a place, after its first marker."""

    def _next_call(self, text: SampledText, start: int) -> int:
        """Returns where the next call that is well-formed so far begins; the end of the text without one.

        Asked about such calls only, this costs one pass over a message.
        """
        following = text.find(self.begin, start)
        while following >= 0 and not self._begins_body(text, following + len(self.begin)):
            following = text.find(self.begin, following + 1)
        return following if following >= 0 else len(text.text)


class XmlCalls(UnquotedCalls):
    """A function with parameters, each with its value on lines of its own."""

    inner = ("<function", "</function", "<parameter", "</parameter")
    _HEAD = re.compile(r"\s*<function=([^>\n]*)>")
    _PARAMETER = re.compile(
        r"\s*<parameter=(?P<key>[^>\n]*)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL
    )
    _TAIL = re.compile(r"\s*</function>")

    def body_end(self, text: SampledText, start: int) -> int:
        parsed = self._parse(text, start, self._next_call(text, start)) if self._begins_body(text, start) else None
        return start if parsed is None else parsed[2]

    def _begins_body(self, text: SampledText, at: int) -> bool:
        return self._HEAD.match(text.text, at) is not None

    def read(self, body: SampledText, schemas: Schemas) -> ToolCall | MalformedToolCall:
        parsed = self._parse(body, 0, len(body.text))
        if parsed is None or body.text[parsed[2] :].strip():
            reason = "a call is <function=NAME>, <parameter=KEY>, VALUE and </parameter> for each, then </function>"
            return MalformedToolCall(body.text, reason)
        return _read_pairs(body.text, *parsed[:2], schemas)

    def _parse(self, text: SampledText, at: int, stop: int) -> tuple[str, list[tuple[str, str]], int] | None:
        """Returns (name, keys and values, where the call ends) of a call that ends before `stop`."""
        head = self._HEAD.match(text.text, at, stop)
        pairs: list[tuple[str, str]] = []
        at = head.end() if head else at
        while head and text.find("</parameter>", at) >= 0:
            parameter = self._PARAMETER.match(text.text, at, stop)
            if parameter is None:
                break
            pairs.append((parameter["key"].strip(), parameter["value"]))
            at = parameter.end()
        tail = self._TAIL.match(text.text, at, stop)
        return (head[1].strip(), pairs, tail.end()) if head and tail else None


class KeyValueCalls(UnquotedCalls):
    """A name, then keys and values between markers of their own."""

    inner = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def body_end(self, text: SampledText, start: int) -> int:
        return self._parse(text, start, self._next_call(text, start))[2] if self._begins_body(text, start) else start

    def _begins_body(self, text: SampledText, at: int) -> bool:
        end, control = text.next_control(at)
        return control in (self.inner[0], self.finish) and is_tool_name(text.text[at:end].strip())

    def read(self, body: SampledText, schemas: Schemas) -> ToolCall | MalformedToolCall:
        name, pairs, end = self._parse(body, 0, len(body.text))
        if name is None or body.text[end:].strip():
            reason = "a call is a name, then <arg_key>KEY</arg_key> and <arg_value>VALUE</arg_value> for each argument"
            return MalformedToolCall(body.text, reason)
        return _read_pairs(body.text, name, pairs, schemas)

    def _parse(self, text: SampledText, at: int, stop: int) -> tuple[str | None, list[tuple[str, str]], int]:
        """Returns (name, keys and values, where the last one ends) of a call that ends before `stop`."""
        place, control = text.next_control(at)
        if control not in (self.inner[0], self.finish, ""):
            return None, [], at
        end = min(stop, place)
        name, pairs, at = text.text[at:end].strip(), [], end
        while (pair := self._pair(text, at, stop)) is not None:
            pairs.append(pair[:2])
            at = pair[2]
        return name or None, pairs, at

    def _pair(self, text: SampledText, at: int, stop: int) -> tuple[str, str, int] | None:
        """Returns (key, value, where they end); None for something else."""
        parts = []
        for begin, end in (self.inner[:2], self.inner[2:]):
            start = _after_space(text.text, at)
            finish = text.find(end, start)
            if text.find(begin, at) != start or not 0 <= finish < stop:
                return None
            parts.append(text.text[start + len(begin) : finish])
            at = finish + len(end)
        return parts[0], parts[1], at


JSON = JsonCalls()
FORMS: tuple[CallForm, ...] = (JSON, XmlCalls(), KeyValueCalls())
"""Forms that templates of several families write (Kimi's is in kimi.py). A template's words say which is its own."""


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
    """Returns the call of a tool. text: what the model wrote. arguments: a value, or a string of JSON.

    Missing, null and empty arguments are an empty object.
    """
    if not is_tool_name(name):
        return MalformedToolCall(text, f"{name!r} is not a tool name")
    try:
        for _ in range(2):  # some models write the object as a string inside of their JSON
            if isinstance(arguments, str):
                arguments = read_json(arguments, "the arguments", strict=False) if arguments.strip() else None
    except ValueError as error:
        return MalformedToolCall(text, str(error))
    if arguments is None:
        return ToolCall(name, {})
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


_SPACE = re.compile(r"\s*")
_PYTHON = {"True": True, "False": False, "None": None}  # of templates that write values with Python's str
_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def _after_space(text: str, start: int) -> int:
    space = _SPACE.match(text, start)
    assert space is not None  # it matches the empty text
    return space.end()


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema names: its own, those of its alternatives and those of its constants."""
    found: set[str] = set()
    for part in [schema, *(_list(schema, "anyOf")), *(_list(schema, "oneOf"))]:
        if isinstance(part, Mapping):
            found |= {kind for kind in [part.get("type"), *_list(part, "type")] if isinstance(kind, str)}
            constants = [*_list(part, "enum"), *([part["const"]] if "const" in part else [])]
            found |= {_JSON_TYPES.get(type(value), "null") for value in constants}
    return found


def _list(schema: Any, key: str) -> list[Any]:
    value = schema.get(key) if isinstance(schema, Mapping) else None
    return value if isinstance(value, list) else []


def _typed(text: str, schema: Any) -> Any:
    """The value of an argument that is written without quotes."""
    kinds = _types(schema)
    if "string" in kinds and not ("null" in kinds and text.strip() in ("null", "None")):
        return text
    if text.strip() in _PYTHON:
        return _PYTHON[text.strip()]
    try:
        value = read_json(text, "the value")
    except ValueError:
        return text
    return text if isinstance(value, str) else value
