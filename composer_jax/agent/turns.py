"""Turns: the messages of the model in a transcript, with what their tools answered."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from composer_jax.agent.transcript import Node, Transcript
from composer_jax.data.chat.chat_format import ChatFormat, ToolSpec
from composer_jax.data.chat.messages import AssistantMessage


@dataclass(frozen=True)
class Turn:
    """A message of the model; a summary is none."""

    node: Node
    message: AssistantMessage
    answers: tuple[str, ...]
    """Those of its first calls, in the order of the calls; none for the calls from a `finish` on, and none where the
    end of the episode cut the calls."""


def find_turns(transcript: Transcript, chat: ChatFormat, tools: Iterable[ToolSpec] = ()) -> list[Turn]:
    """Returns the turns of a transcript, oldest first. A message that branches share has the answers of the first.

    tools: those of the episode.
    """
    tools = list(tools)
    turns: dict[int, Turn] = {}
    for branch in transcript.branches():
        for position, node in enumerate(branch):
            if node.kind == "assistant" and node.id not in turns:
                answers = tool_answers(branch[position + 1 :], chat)
                turns[node.id] = Turn(node, chat.parse(node.sampled_tokens.tolist(), tools), tuple(answers))
    return [turns[number] for number in sorted(turns)]


def tool_answers(later: Sequence[Node], chat: ChatFormat) -> list[str]:
    """Returns the answers to a message: the text of the tool nodes with which `later`, the nodes after it, begins."""
    answers = takewhile(lambda node: node.kind == "tool", later)
    return [chat.answer_text(node.tokens.tolist()) for node in answers]
