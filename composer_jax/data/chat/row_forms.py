"""The forms in which data sets hold conversations, brought into one: messages in OpenAI's form, and declared tools.

    {"messages": [...], "tools": [...]}                             OpenAI; also `functions`, and a column `system`
    {"conversations": [{"from": "human", "value": "..."}, ...]}     ShareGPT
    {"prompt": ..., "completion": ...}                              two texts, or two lists of messages

Messages and tools may be texts of JSON, in which a table cannot add nulls to them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from composer_jax.data.chat.message_fields import parse_text, read_trained

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
}
READ_COLUMNS = ("messages", "system", "tools", "functions", "tokenizer")
HARMLESS_COLUMNS = frozenset({"id", "parallel_tool_calls", "reward", "task_id"})
_OTHER_FORMS = {
    ("instruction", "output"): "Alpaca's form",
    ("chosen", "rejected"): "a preference between two answers",
    ("role", "content"): "a single message",
}


@dataclass(frozen=True)
class ConversationRow:
    """A row of a data set."""

    messages: list[Any]
    """In OpenAI's form, each not checked yet."""
    tools: Any
    """A list of declarations or a text of JSON, not checked yet; None without tools."""
    ignored: tuple[str, ...]
    """Columns with a value that are not read."""


def read_row(row: Any) -> ConversationRow:
    """Brings a row into OpenAI's form. Raises ValueError for a row of another form, which the message names."""
    if not isinstance(row, dict):
        raise ValueError("the row is not an object with messages")
    messages, columns = _messages(row)
    kwargs = row.get("chat_template_kwargs")
    if kwargs:
        raise ValueError(f"the column chat_template_kwargs is {kwargs!r}, which no chat format applies; remove it")
    system = row.get("system")
    if system is not None and not isinstance(system, str):
        raise ValueError("the column system is not a text")
    if system:
        messages = _with_system(system, messages)
    read = {*READ_COLUMNS[1:], *columns}
    ignored = [name for name, value in row.items() if value is not None and name not in read | HARMLESS_COLUMNS]
    return ConversationRow(messages, _tools(row), tuple(ignored))


def _messages(row: Mapping[str, Any]) -> tuple[list[Any], tuple[str, ...]]:
    """The messages of a row, and the columns that they are from."""
    for column in ("messages", "conversations"):
        messages = parse_text(row.get(column), f"the {column}")
        if isinstance(messages, list) and messages:
            return [_from_sharegpt(message, number) for number, message in enumerate(messages, 1)], (column,)
    prompt, completion = row.get("prompt"), row.get("completion")
    if prompt is not None and completion is not None:
        return _from_completion(prompt, completion), ("prompt", "completion")
    form = next((form for names, form in _OTHER_FORMS.items() if set(names) <= row.keys()), "")
    columns = ", ".join(sorted(map(repr, row)))[:200] or "no columns"
    raise ValueError(
        f"the row has {columns}{f' ({form})' if form else ''} and no list of messages that is not empty; SFT reads "
        "messages (OpenAI), conversations (ShareGPT), or prompt and completion"
    )


def _from_sharegpt(message: Any, number: int) -> Any:
    """A message {"from": ..., "value": ...} in OpenAI's form; any other value as it is."""
    if not isinstance(message, dict) or "from" not in message or message.get("role") is not None:
        return message
    author, value = message["from"], message.get("value")
    if not isinstance(author, str) or author not in SHAREGPT_ROLES:
        authors = "human, gpt, system, function_call and observation"
        raise ValueError(f"message {number}: {author!r} is not an author of ShareGPT's form, whose are {authors}")
    others = {name: inner for name, inner in message.items() if name not in ("from", "value")}
    if author != "function_call":
        return {**others, "role": SHAREGPT_ROLES[author], "content": value}
    try:
        calls = parse_text(value, "the calls")
    except ValueError as error:
        raise ValueError(f"message {number}: {error}") from error
    return {**others, "role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]}


def _from_completion(prompt: Any, completion: Any) -> list[Any]:
    """A question and its answer, or the messages of both, of which only the completion is trained."""
    if isinstance(prompt, str) and isinstance(completion, str):
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    if not isinstance(prompt, list) or not isinstance(completion, list):
        kinds = [{str: "a text", list: "a list"}.get(type(value), "neither") for value in (prompt, completion)]
        raise ValueError(
            f"the prompt is {kinds[0]} and the completion {kinds[1]}; give two texts, or two lists of messages"
        )
    return [*(_untrained(message, number) for number, message in enumerate(prompt, 1)), *completion]


def _untrained(message: Any, number: int) -> Any:
    """A message of a prompt, which is not trained if it is the model's."""
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return message
    try:
        read_trained(message)
    except ValueError as error:
        raise ValueError(f"message {number}: {error}") from error
    return {**message, "train": False, "weight": None}


def _with_system(system: str, messages: list[Any]) -> list[Any]:
    first = messages[0]
    if isinstance(first, dict) and first.get("role") in ("system", "developer"):
        if first.get("content") != system:
            raise ValueError("there are two messages of the system: a column, and the first message; keep one of them")
        return messages
    return [{"role": "system", "content": system}, *messages]


def _tools(row: Mapping[str, Any]) -> Any:
    """The tools of the column `tools`, or of OpenAI's older `functions`."""
    tools, functions = row.get("tools"), row.get("functions")
    if not functions:
        return tools
    if tools and tools != functions:
        raise ValueError("the columns tools and functions differ; keep one of them")
    return functions
