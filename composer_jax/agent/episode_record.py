"""An Episode as text: the record that the report shows. Training does not use it."""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from composer_jax.agent.episode import Episode
from composer_jax.agent.tools import error_text, select_tools
from composer_jax.agent.transcript import Node
from composer_jax.agent.turns import tool_answers
from composer_jax.data.chat.chat_format import ChatFormat, ToolSpec
from composer_jax.data.chat.messages import MalformedToolCall, ToolCall
from composer_jax.observe.episodes import CallRecord, EpisodeRecord, MessageRecord, TokenRecord
from composer_jax.tasks.task import Task


def build_episode_record(
    episode: Episode,
    task: Task,
    chat: ChatFormat,
    condition: str,
    step: int | None = None,
    advantages: Mapping[int, np.ndarray] | None = None,
) -> EpisodeRecord:
    """Returns the decoded record of an episode.

    Args:
      condition: of compaction; step: of RL, if any (see EpisodeRecord).
      advantages: node id -> advantages of its sampled tokens (rl/advantage_report.py); None records no single tokens.
    """
    transcript, available = episode.transcript, select_tools(task.tools).values()
    return EpisodeRecord(
        task_id=episode.task_id,
        family=episode.family,
        split=episode.split,
        seed=episode.seed,
        reward=episode.reward,
        outcome=episode.outcome,
        turns=episode.turns,
        summaries=episode.summaries,
        condition=condition,
        step=step,
        tokens=transcript.total_tokens,
        sampled_tokens=transcript.total_sampled,
        summary_tokens=episode.summary_tokens,
        parts={
            **episode.parts,
            "detail": episode.detail,
            **_signs(episode),
        },
        instruction=task.instruction,
        segments=tuple(_segment(branch, chat, available, advantages) for branch in transcript.branches()),
        tools=tuple(task.tools),
    )


def _signs(episode: Episode) -> dict[str, str | int]:
    """Flags, effort and the counts behind the penalties, where there are any."""
    usage = episode.usage
    signs = {
        "flags": "; ".join(episode.flags),
        "effort": episode.effort,
        "malformed_calls": usage.malformed_calls,
        "shell_duplicates": usage.shell_duplicates,
        "unfinished_todos": usage.unfinished_todos,
        "comment_lines": usage.comment_lines,
        "question_instead_of_edit": int(usage.asked_question and not usage.changed_files),
    }
    return {name: sign for name, sign in signs.items() if sign}


def _segment(
    branch: list[Node], chat: ChatFormat, available: Iterable[ToolSpec], advantages: Mapping[int, np.ndarray] | None
) -> tuple[MessageRecord, ...]:
    records = [_message(node, branch[position + 1 :], chat, available) for position, node in enumerate(branch)]
    if advantages is None:
        return tuple(records)
    return tuple(
        dataclasses.replace(record, sampled_tokens=_tokens(node, chat, advantages.get(node.id)))
        for record, node in zip(records, branch, strict=True)
    )


def _tokens(node: Node, chat: ChatFormat, advantages: np.ndarray | None) -> tuple[TokenRecord, ...]:
    known = [None] * len(node.logprobs) if advantages is None else [round(float(a), 5) for a in advantages]
    return tuple(
        TokenRecord(chat.tokenizer.decode([token]), round(float(logprob), 4), advantage)
        for token, logprob, advantage in zip(node.sampled_tokens.tolist(), node.logprobs, known, strict=True)
    )


def _message(node: Node, later: list[Node], chat: ChatFormat, available: Iterable[ToolSpec]) -> MessageRecord:
    calls: tuple[CallRecord, ...] = ()
    if node.kind == "assistant":
        message = chat.parse(node.sampled_tokens.tolist(), available)
        text, calls = message.content, _calls(message.calls, later, chat)
    elif node.kind == "tool":
        text = chat.answer_text(node.tokens.tolist())
    elif node.kind in ("summary_request", "carry"):
        text = chat.user_text(node.tokens.tolist())
    else:
        text = chat.text((node.sampled_tokens if node.sampled else node.tokens).tolist())
    version = int(node.versions[-1]) if node.sampled else None
    return MessageRecord(node.kind, text, len(node.tokens), node.sampled, version, calls)


def _calls(
    calls: tuple[ToolCall | MalformedToolCall, ...], later: list[Node], chat: ChatFormat
) -> tuple[CallRecord, ...]:
    """The calls of a message with their answers, which are the tool nodes that follow in the same order."""
    answers = tool_answers(later, chat)
    records = []
    for position, call in enumerate(calls):
        error = error_text(answers[position]) if position < len(answers) else None
        if isinstance(call, ToolCall):
            records.append(CallRecord(call.name, call.arguments, error))
        else:
            records.append(CallRecord("", call.text, call.reason))
    return tuple(records)
