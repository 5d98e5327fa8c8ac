"""The input of the Responses API in the form of a chat: its items become messages, its tools functions.

A client executes functions, functions in a namespace (Codex declares its sub-agents and MCP servers so), and custom
tools, whose calls are one text; the model sees all of them as functions. Tools that OpenAI's server or the harness
itself implements (web_search, image_generation, mcp, local_shell) are left out, and so are their items in the history.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from composer_jax.data.chat.message_fields import check_fields, read_content
from composer_jax.data.chat.messages import ToolCall
from composer_jax.serve.errors import ApiError

ITEM_FIELDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "namespace", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "namespace", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "reasoning": ("content", "summary", "encrypted_content"),
}
"""Items of an input, and the fields of them that are read."""
HARMLESS_OF_ITEMS = frozenset("created_by end_turn id metadata name namespace phase status type".split()) | {
    "internal_chat_message_metadata_passthrough"
}
LEFT_OUT = ("ghost_snapshot", "mcp_approval_request", "mcp_approval_response", "mcp_list_tools", "tool_search_output")
"""Items of other tools that are left out, beside those whose types end with _call or _call_output."""
CUSTOM_ARGUMENT = "input"
"""The argument of the function that stands for a custom tool."""


@dataclass(frozen=True)
class ClientTool:
    """A tool that the client executes."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None
    function: dict[str, Any]
    """Its declaration as a function of a chat, under the name that the model uses."""

    def call_fields(self, call: ToolCall) -> dict[str, Any]:
        """Returns what the output item of a call says of the tool and its arguments."""
        named = {"name": self.name} | ({"namespace": self.namespace} if self.namespace else {})
        arguments, text = json.dumps(call.arguments, ensure_ascii=False), call.arguments.get(CUSTOM_ARGUMENT)
        if self.kind == "custom":
            is_text = isinstance(text, str) and len(call.arguments) == 1
            return {"type": "custom_tool_call", **named, "input": text if is_text else arguments}
        return {"type": "function_call", **named, "arguments": arguments}


def read_client_tools(rows: Sequence[Any]) -> dict[str, ClientTool]:
    """Returns declared tools that the client executes, by the names that the model uses.

    Raises ApiError for one without a type, and for two that differ and have one name.
    """
    tools: dict[str, ClientTool] = {}
    for row in rows:
        for tool in _read_tool(row, None):
            name = tool.function["name"]
            if tools.setdefault(name, tool) != tool:
                raise ApiError(f"two tools are called {name!r}; rename one.", param="tools")
    return tools


def tool_rows(tools: Mapping[str, ClientTool]) -> list[dict[str, Any]]:
    """Returns tools as a chat declares them."""
    return [{"type": "function", "function": tool.function} for tool in tools.values()]


def _read_tool(tool: Any, namespace: str | None) -> Iterator[ClientTool]:
    if not isinstance(tool, dict):
        raise ApiError(f"a tool of the namespace {namespace!r} is not an object.", param="tools")
    kind, name = tool.get("type"), tool.get("name")
    if not isinstance(kind, str):
        raise ApiError(f"a tool has the type {kind!r}, which is not a text.", param="tools")
    if kind not in ("function", "custom", "namespace"):
        return  # the server executes no tools
    if not isinstance(name, str):
        raise ApiError(f"a tool of the type {kind!r} has no name.", param="tools")
    if kind == "namespace":
        inside = tool.get("tools") or []
        for inner in inside if isinstance(inside, list) else [inside]:
            yield from _read_tool(inner, _full_name(name, namespace))
        return
    parameters = _text_parameters(tool.get("format")) if kind == "custom" else tool.get("parameters")
    function = {"name": _full_name(name, namespace), "description": tool.get("description"), "parameters": parameters}
    yield ClientTool(kind, name, namespace, function)


def _full_name(name: str, namespace: str | None) -> str:
    """What the model calls a tool: as Codex names the tools of MCP servers for models without namespaces."""
    return f"{namespace}__{name}" if namespace else name


def _text_parameters(form: Any) -> dict[str, Any]:
    """The schema of a custom tool's function. Its grammar is shown to the model and not enforced."""
    form = form if isinstance(form, dict) else {}
    grammar = form.get("definition")
    description = f"The text, in this grammar ({form.get('syntax')}):\n{grammar}" if grammar else "The text."
    text = {"type": "string", "description": description}
    return {"type": "object", "properties": {CUSTOM_ARGUMENT: text}, "required": [CUSTOM_ARGUMENT]}


def messages_of(instructions: str | None, items: str | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the instructions and the input as messages of a chat. Raises ApiError for an item that is not read."""
    rows: list[dict[str, Any]] = []
    if instructions:
        rows.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*rows, {"role": "user", "content": items}]
    left_out: set[Any] = set()  # ids of calls
    for number, item in enumerate(items, 1):
        kind, key = item.get("type") or "message", _hashable(item.get("call_id"))
        if not isinstance(kind, str):
            raise ApiError(f"input item {number} has the type {kind!r}, which is not a text.", param="input")
        if kind not in ITEM_FIELDS:
            if not (kind.endswith(("_call", "_call_output")) or kind in LEFT_OUT):
                raise ApiError(f"input item {number} has the type {kind!r}, which is not supported.", param="input")
            left_out.add(key)
        elif key is None or key not in left_out:
            try:
                check_fields(item, ITEM_FIELDS[kind], HARMLESS_OF_ITEMS, f"a {kind}")
                _add_item(kind, item, rows)
            except ValueError as error:
                raise ApiError(f"input item {number}: {error}.", param="input") from error
    return [_with_joined_thoughts(row) for row in rows]


def _hashable(key: Any) -> str | None:
    return key if isinstance(key, str) else None


def _add_item(kind: str, item: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Adds an item to the messages; thoughts, content and calls in a row are of one message of the model.

    A message has its thoughts as a list until all items are read: a text that grows would be copied for each of them.
    """
    last = rows[-1] if rows else {}
    if kind == "message":
        content, is_said = read_content(item), item.get("role") == "assistant"
        if content is None and not is_said:
            raise ValueError("it has no content")
        row = {"role": item.get("role"), "content": content or ""}
        if is_said and last.keys() == {"role", "reasoning_content"}:
            last |= row
        else:
            rows.append(row)
    elif kind.endswith("_output"):
        answer = read_content({"content": item.get("output")}) or ""
        rows.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": answer})
    elif kind.endswith("_call"):
        name, namespace = item.get("name"), item.get("namespace")
        if not isinstance(name, str) or not isinstance(namespace, str | None):
            raise ValueError(f"its name {name!r} in the namespace {namespace!r} is not a text")
        arguments = {CUSTOM_ARGUMENT: item.get("input") or ""} if kind == "custom_tool_call" else item.get("arguments")
        function = {"name": _full_name(name, namespace), "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if last.get("role") != "assistant":
            rows.append({"role": "assistant"})
        rows[-1].setdefault("tool_calls", []).append(call)
    elif thoughts := _thoughts(item):
        if last.keys() == {"role", "reasoning_content"}:  # what was between them is left out
            last["reasoning_content"].append(thoughts)
        else:
            rows.append({"role": "assistant", "reasoning_content": [thoughts]})


def _with_joined_thoughts(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"reasoning_content": "\n".join(row["reasoning_content"])} if "reasoning_content" in row else row


def _thoughts(item: dict[str, Any]) -> str:
    """The text of a reasoning item: its content as the server writes it, else its summary."""
    parts = item.get("content") or item.get("summary") or []
    if not parts and item.get("encrypted_content"):
        raise ValueError("encrypted reasoning cannot be read")
    thoughts = ("reasoning_text", "summary_text")
    known = isinstance(parts, list) and all(isinstance(part, dict) and part.get("type") in thoughts for part in parts)
    return read_content({"content": [{**part, "type": "text"} for part in parts] if known else parts}) or ""
