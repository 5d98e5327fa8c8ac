"""Tool calls in the style of Hermes and Qwen: a JSON object with name and arguments between two markers."""

from collections.abc import Sequence

from composer_jax.data.chat.messages import (
    AssistantMessage,
    CallSpan,
    CallTokens,
    MalformedToolCall,
    ToolCall,
    is_tool_name,
    join_content,
    read_json,
    scan_calls,
)
from composer_jax.data.model_tokenizer import ModelTokenizer

CALL = ("<tool_call>", "</tool_call>")
"""The markers around a call: control tokens where the tokenizer has them, else ordinary text."""
ANSWER = ("<tool_response>", "</tool_response>")
"""The markers around the answer to a call."""


def read_call(text: str) -> ToolCall | MalformedToolCall:
    """Parses the text between the markers of a call."""
    try:
        value = read_json(text, "the name and arguments")
    except ValueError as error:
        return MalformedToolCall(text, str(error))
    if not isinstance(value, dict) or value.keys() != {"name", "arguments"}:
        return MalformedToolCall(text, 'a call is a JSON object, like {"name": "tool", "arguments": {"key": "value"}}')
    if not isinstance(value["name"], str) or not is_tool_name(value["name"]):
        return MalformedToolCall(text, f"{value['name']!r} is not a tool name")
    if not isinstance(value["arguments"], dict):
        return MalformedToolCall(text, "the arguments are not a JSON object")
    return ToolCall(value["name"], value["arguments"])


def parse_control_calls(
    tok: ModelTokenizer, sampled: Sequence[int], control: CallTokens, separator: str
) -> AssistantMessage:
    """Parses a message whose calls are between control tokens; `separator` is written between content and calls."""
    message = scan_calls(sampled, control)
    before = tok.decode(message.before)
    if message.calls:
        before = before.removesuffix(separator)
    calls = tuple(_read_span(tok, span) for span in message.calls)
    return AssistantMessage(join_content(before, tok.decode(message.after)), calls, message.complete)


def _read_span(tok: ModelTokenizer, span: CallSpan) -> ToolCall | MalformedToolCall:
    text = tok.decode(span.ids)
    if not span.closed:
        return MalformedToolCall(text, f"the call does not end with {CALL[1]}")
    if tok.without_control(span.ids) != span.ids:
        return MalformedToolCall(text, "a control token is inside the call")
    return read_call(text)
