"""One interface to the formats in which a conversation becomes token ids.

An episode starts with `render`; then, again and again, `generation_prompt` is given, the model samples a message,
`parse` reads it, and `bridge` gives what comes back from its tools. Nothing that was sampled is ever made into text
and back.

Text (of a user, a tool, a file) becomes ids of text in every format: no text can forge a control token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from composer_jax.data.chat import AssistantMessage, Malformed, ToolCall

Role = Literal["system", "user", "tool"]


@dataclass(frozen=True)
class Message:
    """What somebody other than the model says. A "tool" answers a call of the assistant message before it."""

    role: Role
    content: str


Conversation = Sequence[Message | AssistantMessage]


class ToolSpec(Protocol):
    """What a model is told of a tool. `parameters` is the JSON schema of its arguments."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, Any]: ...


class ChatFormat(ABC):
    """How a conversation is written in token ids. Immutable; safe to share between threads.

    end: the id that ends a message of the model. generation_prompt: the ids given before the model samples a message.
    """

    end: int
    generation_prompt: list[int]

    @abstractmethod
    def render(self, messages: Conversation, tools: Iterable[ToolSpec] = ()) -> list[int]:
        """A whole conversation, from its first id on, with the declarations of the tools where the format has any.

        Equal to the start of it, followed turn by turn by `generation_prompt`, what `render_assistant` gives, and
        `bridge` or `close` and `user`. One that ends with an assistant message ends with `end`. Raises ValueError for
        calls that `render_assistant` refuses, and for answers that no call asked for.
        """

    @abstractmethod
    def render_assistant(self, content: str, calls: Sequence[ToolCall], *, calls_before: int = 0) -> list[int]:
        """Exactly what a model would sample to say this: no generation prompt, `end` included.

        calls_before: calls in the conversation so far, for formats that number them.
        Raises ValueError for a call that `parse` would not read back.
        """

    @abstractmethod
    def parse(self, ids: Iterable[int]) -> AssistantMessage:
        """Reads what `render_assistant` writes. Never raises: bad calls become Malformed, whatever the ids.

        The message ends at the first `end`; what follows is not part of it. Other control tokens are shown by name.
        """

    @abstractmethod
    def close(self, sampled: Sequence[int]) -> list[int]:
        """What stands between a sampled message and the next one: `end` where it was cut off, then a separator."""

    @abstractmethod
    def bridge(self, sampled: Sequence[int], answers: Sequence[str]) -> list[list[int]]:
        """The turn after a sampled message with calls: one list of ids per answer, to be joined in this order.

        answers: the results of its first calls, in the order of the calls. The first list begins with `close`.
        Raises ValueError for more answers than calls.
        """

    @abstractmethod
    def user(self, parts: Sequence[str | Sequence[int]]) -> list[int]:
        """A user message that follows another message of the harness, such as the answers of tools.

        Its body may mix text with ids that were sampled earlier, such as a summary. The ids stay as they are, but
        control tokens are left out: a body can neither open nor close a message.
        """

    @abstractmethod
    def text(self, ids: Sequence[int]) -> str:
        """Ids of messages as text for people: no control tokens, and no headings where they can be told apart."""

    @abstractmethod
    def answer_text(self, ids: Sequence[int]) -> str:
        """The answer that one of the lists of `bridge` holds."""


def declarations(tools: Iterable[ToolSpec]) -> list[dict[str, Any]]:
    """The tools as chat templates and JSON interfaces declare them: a list of functions."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
        }
        for tool in tools
    ]


def rendered_calls(message: AssistantMessage) -> list[ToolCall]:
    """The calls of a message that is to be rendered. Raises ValueError for one that could not be read."""
    for call in message.calls:
        if isinstance(call, Malformed):
            raise ValueError(f"a malformed call cannot be rendered: {call.text[:80]!r} ({call.reason})")
    return list(message.calls)


def check_answers(asked: int, answers: int) -> None:
    """Raises ValueError for more answers than calls."""
    if answers > asked:
        raise ValueError(f"{answers} answers to {asked} calls; every answer belongs to a call")
