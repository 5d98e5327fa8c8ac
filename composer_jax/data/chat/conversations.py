"""Conversations in OpenAI's form as training data: {"messages": [...], "tools": [...]} -> token ids and a mask.

    {"role": "assistant", "content": "...", "tool_calls": [{"id": "1", "type": "function", "function":
      {"name": "read", "arguments": "{\\"path\\": \\"a.py\\"}"}}], "train": false}

Beyond OpenAI's fields, a message of the model may have `train` (false leaves it out of the loss), and a message may
have `token_ids`: the ids that were sampled, where encoding the text would give others. They count for a reader whose
tokenizer has the fingerprint in the row's field `tokenizer`. A call of type "malformed" has the text of a call that
could not be parsed; it can be trained on from token ids only.

A conversation is rendered as an episode makes it: the beginning by the chat format, then turn by turn what a model
would sample and what a harness adds. Thinking of earlier turns therefore stays, whatever the template does with given
conversations.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from composer_jax.data.chat.chat_format import ChatFormat, Message
from composer_jax.data.chat.messages import AssistantMessage, MalformedToolCall, ToolCall, check_call, read_json

ROLES = ("system", "user", "assistant", "tool")


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
    users: list[str | tuple[int, ...]] = field(default_factory=list)
    """Messages of the user that follow: their text, or their token ids."""


@dataclass(frozen=True)
class TrainingConversation:
    """A conversation of which messages of the model are trained."""

    prompt: tuple[Message, ...]
    """The messages before the first one of the model."""
    turns: tuple[ModelTurn, ...]
    tools: tuple[DeclaredTool, ...]
    tokenizer: str
    """Fingerprint of the tokenizer that the token ids belong to; "" without token ids."""


def read_conversation(row: Any) -> TrainingConversation:
    """Parses a row. Raises ValueError with a reason that names the message by its number, from 1."""
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError("there is no list of messages; a row is an object with messages")
    prompt, turns = _read_all(messages)
    if not turns:
        raise ValueError("no message is the model's, so there is nothing to train on")
    if turns[-1].users:
        raise ValueError("the conversation ends with a user; the last message must be the model's")
    if not any(turn.trained for turn in turns):
        raise ValueError("no message of the model is to be trained")
    tools = read_tools(row.get("tools"))
    return TrainingConversation(tuple(prompt), tuple(turns), tools, str(row.get("tokenizer") or ""))


def read_messages(rows: Sequence[Mapping[str, Any]]) -> list[Message | AssistantMessage]:
    """Parses a conversation that the model is to answer. Raises ValueError with a reason that names the message."""
    prompt, turns = _read_all(rows)
    messages: list[Message | AssistantMessage] = [*prompt]
    for turn in turns:
        messages += [turn.message, *(Message("tool", turn.answers[place]) for place in sorted(turn.answers))]
        for user in turn.users:
            if not isinstance(user, str):
                raise ValueError("a message of the user has token_ids, which only training reads; leave them out")
            messages.append(Message("user", user))
    if turns and len(turns[-1].answers) < len(turns[-1].message.calls):
        raise ValueError("the last tool calls have no answers")
    return messages


def _read_all(messages: Sequence[Any]) -> tuple[list[Message], list[ModelTurn]]:
    prompt: list[Message] = []
    turns: list[ModelTurn] = []
    for number, message in enumerate(messages, 1):
        try:
            _add(message, prompt, turns)
        except ValueError as error:
            raise ValueError(f"message {number}: {error}") from error
    return prompt, turns


def conversation_trace(conversation: TrainingConversation, chat: ChatFormat) -> tuple[np.ndarray, np.ndarray]:
    """Returns (token ids int32[n], trained bool[n]), up to the last trained token.

    Trained are exactly the ids that a model samples: content, calls and the end token.

    Raises:
      ValueError: the chat format cannot render the conversation, or it has token ids of another tokenizer.
      UserError: the chat template refuses the conversation.
    """
    exact = bool(conversation.tokenizer) and conversation.tokenizer == chat.tokenizer.fingerprint
    ids = chat.render(conversation.prompt, conversation.tools)
    trained = [False] * len(ids)
    calls_before = 0
    for turn in conversation.turns:
        sampled = _sampled(turn, chat, exact, calls_before)
        calls_before += len(turn.message.calls)
        answers = [turn.answers[place] for place in sorted(turn.answers)]
        after = [i for piece in chat.bridge(sampled, answers) for i in piece] if answers else chat.close(sampled)
        for user in turn.users:
            if not isinstance(user, str) and not exact:
                raise ValueError("a message of the user has token ids of another tokenizer")
            after += chat.user([user], follows=[*sampled, *after])
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


def _add(message: Any, prompt: list[Message], turns: list[ModelTurn]) -> None:
    """Adds a message to the prompt or the turns. Raises ValueError for one that does not belong there."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ROLES:
        raise ValueError(f"{role!r} is not a role; use {', '.join(ROLES)}")
    if role == "tool":
        return _answer(message, turns)
    if turns and len(turns[-1].answers) < len(turns[-1].message.calls):
        raise ValueError("it follows tool calls that have no answers")
    if role == "assistant":
        if not prompt:
            raise ValueError("the conversation begins with the model; it must begin with a user")
        content, calls = _content(message), message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise ValueError("tool_calls is not a list")
        parsed = tuple(_call(call, place) for place, call in enumerate(calls, 1))
        train, given = message.get("train"), [call.get("id") for call in calls]
        if train not in (None, True, False):
            raise ValueError(f"train={train!r} is neither true nor false")
        said = AssistantMessage(content, parsed, True)
        turns.append(ModelTurn(said, train is not False, _token_ids(message), given))
    elif not turns:
        prompt.append(Message(role, _content(message)))
    elif role == "system":
        raise ValueError("a message of the system comes after one of the model; it belongs at the beginning")
    else:
        ids = _token_ids(message)
        turns[-1].users.append(_content(message) if ids is None else ids)


def _answer(message: Mapping[str, Any], turns: list[ModelTurn]) -> None:
    """Adds the answer to a call: to the one that it names, or to the first without an answer."""
    turn = turns[-1] if turns else None
    if turn is None or turn.users or len(turn.answers) == len(turn.message.calls):
        raise ValueError("it is the answer of a tool, and no call waits for one")
    key = message.get("tool_call_id")
    waiting = [place for place in range(len(turn.call_ids)) if place not in turn.answers]
    named = [place for place in waiting if key is None or turn.call_ids[place] in (None, key)]
    if not named:
        raise ValueError(f"it answers the call {key!r}, and no call of that id waits for an answer")
    turn.answers[named[0]] = _content(message)


def _content(message: Mapping[str, Any]) -> str:
    """The text of a message, which may be in parts."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise ValueError("its content is not text; images and other parts cannot be trained on")
    return content


def _call(call: Any, place: int) -> ToolCall | MalformedToolCall:
    if isinstance(call, dict) and call.get("type") == "malformed":
        return MalformedToolCall(str(call.get("text", "")), "it was malformed when it was recorded")
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"call {place} has no function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = read_json(arguments, f"the arguments of call {place}")
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of call {place} are not a JSON object")
    parsed = ToolCall(function["name"], arguments)
    check_call(parsed)
    return parsed


def _token_ids(message: Mapping[str, Any]) -> tuple[int, ...] | None:
    ids = message.get("token_ids")
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError("token_ids is not a list of token ids")
    return tuple(ids)


def read_tools(tools: Any) -> tuple[DeclaredTool, ...]:
    """Parses declared tools, of which some data sets have a string of JSON. Raises ValueError with a reason."""
    if isinstance(tools, str):
        tools = read_json(tools, "the tools") if tools else None
    if tools is not None and not isinstance(tools, list):
        raise ValueError("tools is not a list")
    return tuple(_tool(tool, number) for number, tool in enumerate(tools or [], 1))


def _tool(tool: Any, number: int) -> DeclaredTool:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"tool {number} has no function with a name")
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"the parameters of tool {number} are not a JSON schema")
    return DeclaredTool(function["name"], str(function.get("description") or ""), parameters)


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
