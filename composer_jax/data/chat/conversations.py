"""Conversations in OpenAI's form as training data: {"messages": [...], "tools": [...]} -> token ids and a mask.

    {"role": "assistant", "content": "...", "tool_calls": [{"id": "1", "type": "function", "function":
      {"name": "read", "arguments": "{\\"path\\": \\"a.py\\"}"}}], "train": false}

data/chat/row_forms.py has the other forms of rows that are read, data/chat/message_fields.py the fields of messages.
Beyond OpenAI's, a message of the model may have `train` (false leaves it out of the loss), and a message may have
`token_ids`: the ids that were sampled, where encoding the text would give others. They count for a reader whose
tokenizer has the fingerprint in the row's field `tokenizer`. A call of type "malformed" has the text of a call that
could not be parsed; it can be trained on from token ids only.

A conversation is rendered as an episode makes it: the beginning by the chat format, then turn by turn what a model
would sample and what a harness adds. Thinking of earlier turns therefore stays, whatever the template does with given
conversations.
"""

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from composer_jax.data.chat.chat_format import ChatFormat, Message
from composer_jax.data.chat.control_text import THINKING
from composer_jax.data.chat.message_fields import (
    HARMLESS_OF_TOOLS,
    check_fields,
    check_json,
    parse_text,
    read_calls,
    read_content,
    read_role,
    read_said,
    read_token_ids,
    read_trained,
)
from composer_jax.data.chat.messages import AssistantMessage, MalformedToolCall, ToolCall
from composer_jax.data.chat.row_forms import read_row

_MARKERS = re.compile("|".join(map(re.escape, THINKING)))


@dataclass(frozen=True)
class DeclaredTool:
    """A tool of a conversation (chat_format.ToolSpec)."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass
class ModelTurn:
    """A message of the model, and what the harness wrote after it."""

    message: AssistantMessage
    trained: bool
    token_ids: tuple[int, ...] | None
    """The sampled ids; None if the chat format gives them."""
    call_ids: list[str | None]
    answers: dict[int, str] = field(default_factory=dict)
    """Results by the place of the call."""
    later: list[Message | tuple[int, ...]] = field(default_factory=list)
    """Messages of the user that follow, or their token ids, and those of the system, which training refuses."""


@dataclass(frozen=True)
class TrainingConversation:
    """A conversation of which messages of the model are trained."""

    prompt: tuple[Message, ...]
    """The messages before the first one of the model."""
    turns: tuple[ModelTurn, ...]
    tools: tuple[DeclaredTool, ...]
    tokenizer: str
    """Fingerprint of the tokenizer that the token ids belong to; "" without token ids."""
    ignored_columns: tuple[str, ...] = ()
    """Columns of the row that have a value and are not read."""


def read_conversation(row: Any) -> TrainingConversation:
    """Parses a row. Raises ValueError with a reason that names the message by its number, from 1."""
    read = read_row(row)
    prompt, turns = _read_all(read.messages, trains=True)
    if not turns:
        raise ValueError("no message is the model's, so there is nothing to train on")
    if turns[-1].later:
        raise ValueError("the conversation ends with a user; the last message must be the model's")
    if not any(turn.trained for turn in turns):
        raise ValueError("no message of the model is to be trained")
    tools, tokenizer = read_tools(read.tools), str(row.get("tokenizer") or "")
    return TrainingConversation(tuple(prompt), tuple(turns), tools, tokenizer, read.ignored)


def read_messages(rows: Sequence[Mapping[str, Any]]) -> list[Message | AssistantMessage]:
    """Parses a conversation that the model is to answer. Raises ValueError with a reason that names the message."""
    prompt, turns = _read_all(rows, trains=False)
    messages: list[Message | AssistantMessage] = [*prompt]
    for turn in turns:
        messages += [turn.message, *(Message("tool", turn.answers[place]) for place in sorted(turn.answers))]
        for message in turn.later:
            if not isinstance(message, Message):
                raise ValueError("a message of the user has token_ids, which only training reads; leave them out")
            messages.append(message)
    if turns and len(turns[-1].answers) < len(turns[-1].message.calls):
        raise ValueError("the last tool calls have no answers")
    return messages


def _read_all(messages: Sequence[Any], *, trains: bool) -> tuple[list[Message], list[ModelTurn]]:
    prompt: list[Message] = []
    turns: list[ModelTurn] = []
    for number, message in enumerate(messages, 1):
        try:
            _add(message, prompt, turns)
            if trains and turns and read_role(message) == "system":
                raise ValueError("a message of the system comes after one of the model; it belongs at the beginning")
        except ValueError as error:
            raise ValueError(f"message {number}: {error}") from error
    return prompt, turns


def conversation_trace(conversation: TrainingConversation, chat: ChatFormat) -> tuple[np.ndarray, np.ndarray]:
    """Returns (token ids int32[n], trained bool[n]), up to the last trained token.

    Trained are exactly the ids that a model samples: content, calls and the end token.

    Raises:
      ValueError: the chat format cannot render the conversation or leaves out a part of it, or it has token ids of
        another tokenizer.
      UserError: the chat template refuses the conversation.
    """
    exact = bool(conversation.tokenizer) and conversation.tokenizer == chat.tokenizer.fingerprint
    ids = chat.render(conversation.prompt, conversation.tools)
    written = _letters(chat.tokenizer.decode(ids))
    for message in conversation.prompt:
        _check_written(message.content, written)
    declared = _MARKERS.sub(" ", " ".join(f"{tool.name} {tool.description}" for tool in conversation.tools))
    unwritten = [word for word in re.findall(r"[A-Za-z0-9_]+", declared) if word not in written]
    if unwritten and ids != chat.render(conversation.prompt):  # a format may declare no tools at all
        raise ValueError(f"the chat template does not write {unwritten[0]!r} of the declared tools")
    trained = [False] * len(ids)
    calls_before = 0
    for turn in conversation.turns:
        sampled = _sampled(turn, chat, exact, calls_before)
        calls_before += len(turn.message.calls)
        answers = [turn.answers[place] for place in sorted(turn.answers)]
        pieces = chat.bridge(sampled, answers) if answers else [chat.close(sampled)]
        for answer, piece in zip(answers, pieces, strict=False):
            _check_written(answer, _letters(chat.answer_text(piece)))
        after = [i for piece in pieces for i in piece]
        for user in turn.later:
            if not isinstance(user, Message) and not exact:
                raise ValueError("a message of the user has token ids of another tokenizer")
            after += chat.user([user.content if isinstance(user, Message) else user], follows=[*sampled, *after])
        ids += [*chat.generation_prompt, *sampled, *after]
        trained += [False] * len(chat.generation_prompt) + [turn.trained] * len(sampled) + [False] * len(after)
    end = len(trained) - trained[::-1].index(True)
    return np.asarray(ids[:end], np.int32), np.asarray(trained[:end], bool)


def _sampled(turn: ModelTurn, chat: ChatFormat, exact: bool, calls_before: int) -> list[int]:
    if turn.token_ids is not None and exact:
        return list(turn.token_ids)
    calls = [call for call in turn.message.calls if isinstance(call, ToolCall)]
    if len(calls) < len(turn.message.calls):
        raise ValueError("a malformed call has no token ids of this tokenizer; leave the conversation out")
    return chat.render_assistant(turn.message.content, calls, calls_before=calls_before)


def _check_written(text: str, letters: str) -> None:
    """Raises ValueError for a text that does not occur in what a chat template wrote, as `_letters` gives it."""
    if _letters(text) not in letters:
        raise ValueError(f"the chat template does not write the whole of {text[:80]!r}; leave the conversation out")


def _letters(text: str) -> str:
    """The text without what templates and tokenizers may change: white space, forms of a letter, marks of thinking."""
    return "".join(unicodedata.normalize("NFKD", _MARKERS.sub("", text)).split())


def _add(message: Any, prompt: list[Message], turns: list[ModelTurn]) -> None:
    """Adds a message to the prompt or the turns. Raises ValueError for one that does not belong there."""
    role, trained = read_role(message), read_trained(message)
    if role == "tool":
        return _answer(message, turns)
    if turns and len(turns[-1].answers) < len(turns[-1].message.calls):
        raise ValueError("it follows tool calls that have no answers")
    ids, content = read_token_ids(message), read_content(message)
    if role == "assistant":
        if not prompt:
            raise ValueError("the conversation begins with the model; it must begin with a user")
        said, calls = read_said(message), read_calls(message)
        if content is None and not said and not calls and ids is None:
            raise ValueError("it has neither content nor calls")
        parsed = AssistantMessage(said, tuple(call for _, call in calls), True)
        turns.append(ModelTurn(parsed, trained, ids, [key for key, _ in calls]))
    elif content is None:
        raise ValueError("it has no content")
    elif not turns:
        if ids is not None:
            raise ValueError("token_ids are read after the first message of the model; leave them out here")
        prompt.append(Message(role, content))
    else:
        turns[-1].later.append(Message(role, content) if ids is None else ids)


def _answer(message: Mapping[str, Any], turns: list[ModelTurn]) -> None:
    """Adds the answer to a call: to the one that it names, or to the first without an answer."""
    turn = turns[-1] if turns else None
    if turn is None or turn.later or len(turn.answers) == len(turn.message.calls):
        raise ValueError("it is the answer of a tool, and no call waits for one")
    key = message.get("tool_call_id")
    waiting = [place for place in range(len(turn.call_ids)) if place not in turn.answers]
    named = [place for place in waiting if key is None or turn.call_ids[place] in (None, key)]
    if not named:
        raise ValueError(f"it answers the call {key!r}, and no call of that id waits for an answer")
    call, name = turn.message.calls[named[0]], message.get("name")
    if message["role"] == "function" and isinstance(call, ToolCall) and name not in (None, call.name):
        raise ValueError(f"it answers {name!r}, and the call that waits is of {call.name!r}")
    turn.answers[named[0]] = read_content(message) or ""


def read_tools(tools: Any) -> tuple[DeclaredTool, ...]:
    """Parses declared tools, of which some data sets have texts of JSON. Raises ValueError with a reason."""
    tools = parse_text(tools, "the tools")
    if tools is not None and not isinstance(tools, list):
        raise ValueError("tools is not a list")
    return tuple(_tool(parse_text(tool, f"the fields of tool {n}"), n) for n, tool in enumerate(tools or [], 1))


def _tool(tool: Any, number: int) -> DeclaredTool:
    fields: dict[str, Any] = tool if isinstance(tool, dict) else {}
    function = fields.get("function")
    if function is None:  # OpenAI's older form, without a wrapper
        function = fields
    else:
        check_fields(fields, ("type", "function"), HARMLESS_OF_TOOLS, f"tool {number}")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"tool {number} has no function with a name")
    check_fields(function, ("name", "description", "parameters"), HARMLESS_OF_TOOLS, f"tool {number}")
    parameters = parse_text(function.get("parameters"), f"the parameters of tool {number}") or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"the parameters of tool {number} are not a JSON schema")
    declared = DeclaredTool(function["name"], str(function.get("description") or ""), parameters)
    check_json([declared.name, declared.description, parameters], f"the fields of tool {number}")
    return declared


def assistant_row(message: AssistantMessage, call_number: int) -> dict[str, Any]:
    """Returns a message of the model in OpenAI's form; its calls are numbered from `call_number`."""
    row: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.calls:
        row["tool_calls"] = [_call_row(call, f"call_{n}") for n, call in enumerate(message.calls, call_number)]
    return row


def _call_row(call: ToolCall | MalformedToolCall, key: str) -> dict[str, Any]:
    if isinstance(call, MalformedToolCall):
        return {"id": key, "type": "malformed", "text": call.text}
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": key, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def tool_row(content: str, call_number: int) -> dict[str, Any]:
    """Returns the answer to the call of that number in OpenAI's form."""
    return {"role": "tool", "tool_call_id": f"call_{call_number}", "content": content}


def text_row(role: str, content: str, token_ids: Sequence[int] | None = None) -> dict[str, Any]:
    """Returns a message of the system or a user in OpenAI's form.

    token_ids: those of its body, where encoding the text would give others.
    """
    return {"role": role, "content": content} | ({} if token_ids is None else {"token_ids": list(token_ids)})
