"""Episodes as conversations in OpenAI's form, for SFT and for other tools (data/chat/conversations.py reads them)."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from composer_jax.agent import tools
from composer_jax.agent.episode import Episode
from composer_jax.agent.transcript import Node
from composer_jax.data.chat.chat_format import ChatFormat, Message, ToolSpec, declarations
from composer_jax.data.chat.conversations import (
    assistant_row,
    conversation_trace,
    read_conversation,
    text_row,
    tool_row,
)
from composer_jax.data.chat.messages import AssistantMessage, MalformedToolCall, ToolCall
from composer_jax.observe.episodes import EpisodeRecord, MessageRecord
from composer_jax.tasks.task import Task


def episode_rows(episode: Episode, task: Task, chat: ChatFormat, system_prompt: str = "") -> list[dict[str, Any]]:
    """Returns a conversation for each training row of an episode's transcript, in the order of Transcript.rows.

    Reading one back gives the same ids and the same mask. Messages whose text would be encoded differently than it was
    sampled carry their token ids.

    system_prompt: that of the episode.

    Raises ValueError if the prompt of the episode is another than that of the task and `system_prompt`.
    """
    prompt, declared = _prompt(task.instruction, task.tools, system_prompt)
    begin = [Message(row["role"], row["content"]) for row in prompt]
    rows, done = [], set[int]()
    training_rows = iter(episode.transcript.rows())
    for branch in episode.transcript.branches():
        trained = [node.sampled and node.trained and node.id not in done for node in branch]
        done |= {node.id for node in branch if node.sampled}
        if not any(trained):
            continue
        available = tools.select_tools(task.tools).values()
        if branch[0].tokens.tolist() != chat.render(begin, available):
            raise ValueError(f"the episode of {episode.task_id} begins with another prompt than its task")
        last = len(trained) - trained[::-1].index(True)
        messages, exact = _messages(branch[1:last], trained[1:last], chat, available)
        row = {"messages": [*prompt, *messages], **declared, "task_id": task.id, "reward": episode.reward}
        if exact:
            row["tokenizer"] = chat.tokenizer.fingerprint
        want = next(training_rows)
        tokens, mask = conversation_trace(read_conversation(row), chat)
        if not (np.array_equal(tokens, want.tokens) and np.array_equal(mask, want.trained)):
            raise ValueError(f"the episode of {episode.task_id} is not what its conversation is rendered to")
        rows.append(row)
    return rows


def record_rows(record: EpisodeRecord, system_prompt: str = "") -> list[dict[str, Any]]:
    """Returns a conversation for each segment of a recorded episode, whose text is encoded again when it is read.

    Raises ValueError for an episode with a malformed call, of which a record has too little.
    """
    prompt, declared = _prompt(record.instruction, record.tools, system_prompt)
    rows = []
    for segment in record.segments:
        messages: list[dict[str, Any]] = []
        calls = answers = 0
        last = max((place for place, message in enumerate(segment) if message.sampled), default=0)
        for message in segment[1 : last + 1]:
            if message.kind == "tool":
                messages.append(tool_row(message.text, answers))
                answers += 1
            elif message.sampled:
                said = _recorded(message)
                messages.append(assistant_row(said, calls))
                answers, calls = calls, calls + len(said.calls)
            else:
                messages.append(text_row("user", message.text))
        if last:
            rows.append(
                {"messages": [*prompt, *messages], **declared, "task_id": record.task_id, "reward": record.reward}
            )
    return rows


def _prompt(instruction: str, names: Iterable[str], system_prompt: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    system = [text_row("system", system_prompt)] if system_prompt else []
    declared = declarations(tools.select_tools(tuple(names)).values())
    return [*system, text_row("user", instruction)], {"tools": declared} if declared else {}


def _messages(
    nodes: Sequence[Node], trained: Sequence[bool], chat: ChatFormat, available: Iterable[ToolSpec]
) -> tuple[list[dict[str, Any]], bool]:
    messages: list[dict[str, Any]] = []
    calls = answers = 0
    for node, is_trained in zip(nodes, trained, strict=True):
        if node.kind == "tool":
            messages.append(tool_row(chat.answer_text(node.tokens.tolist()), answers))
            answers += 1
        elif node.sampled:
            ids = node.sampled_tokens.tolist()
            said = chat.parse(ids, available)
            row = assistant_row(said, calls) | ({} if is_trained else {"train": False})
            if _rendered(said, calls, chat) != ids:
                row["token_ids"] = ids
            messages.append(row)
            answers, calls = calls, calls + len(said.calls)
        else:
            ids = node.tokens.tolist()
            text, body = chat.user_text(ids), chat.user_body(ids)
            messages.append(text_row("user", text, None if chat.user_body(chat.user([text])) == body else body))
    return messages, any("token_ids" in message for message in messages)


def _rendered(said: AssistantMessage, calls_before: int, chat: ChatFormat) -> list[int] | None:
    """The ids of a message made from its text; None if it has a malformed call."""
    calls = [call for call in said.calls if isinstance(call, ToolCall)]
    if len(calls) < len(said.calls):
        return None
    try:
        return chat.render_assistant(said.content, calls, calls_before=calls_before)
    except ValueError:  # the text of a message can look like a call that was not one
        return None


def _recorded(message: MessageRecord) -> AssistantMessage:
    if any(not call.name for call in message.calls):
        raise ValueError("a call of the episode is malformed")
    calls: tuple[ToolCall | MalformedToolCall, ...] = tuple(
        ToolCall(call.name, call.arguments) for call in message.calls
    )
    return AssistantMessage(message.text, calls, True)
