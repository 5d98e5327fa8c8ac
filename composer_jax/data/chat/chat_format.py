"""ChatFormat: the interface of all formats in which a conversation is written as token ids.

An episode starts with `render`. In each turn the context then gets `generation_prompt`, the message that the model
samples, and the answers of its tools from `bridge`; `parse` reads the message. Sampled ids are never re-encoded.

Text of a user, a tool or a file is encoded as text in every format: it cannot forge a control token.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from composer_jax.data.chat.content_reader import ContentReader, TextReader
from composer_jax.data.chat.messages import AssistantMessage, MalformedToolCall, ToolCall
from composer_jax.data.model_tokenizer import ModelTokenizer
from composer_jax.data.text_tokenizer import TextTokenizer

Role = Literal["system", "user", "tool"]


@dataclass(frozen=True)
class Message:
    """A message that the model did not write. A "tool" message answers a call of the assistant message before it."""

    role: Role
    content: str


Conversation = Sequence[Message | AssistantMessage]


class ToolSpec(Protocol):
    """What a format declares of a tool. `parameters` is the JSON schema of the arguments."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, Any]: ...


class ChatFormat(ABC):
    """How a conversation is written as token ids. Immutable; safe to share between threads."""

    tokenizer: TextTokenizer
    """Encodes the text of messages."""
    end: int
    """The id with which this format ends a message of the model."""
    end_tokens: tuple[int, ...]
    """All ids that end a message of the model, `end` first; sampling stops at each of them."""
    reads_thinking = False
    """Whether `parse` tells what the model thought from what it said."""
    generation_prompt: list[int]
    """The ids before a message of the model, which the model does not sample."""
    lead: str = ""
    """White space before the content of a message of the model, which `parse` leaves out."""

    @abstractmethod
    def render(self, messages: Conversation, tools: Iterable[ToolSpec] = ()) -> list[int]:
        """Returns a whole conversation, with declarations of the tools if the format has them.

        The same ids result turn by turn: the rendered beginning, then `generation_prompt`, `render_assistant`, and
        `bridge` or `close` and `user`. A last message of the model ends with one of `end_tokens`.

        Raises ValueError for calls that `render_assistant` refuses, answers without a call, and messages of the system
        that the format cannot write where they are.
        """

    @abstractmethod
    def render_assistant(self, content: str, calls: Sequence[ToolCall], *, calls_before: int = 0) -> list[int]:
        """Returns the ids that a model would sample for this message: no generation prompt, `end` included.

        calls_before: number of earlier calls in the conversation, for formats that number calls.

        Raises ValueError for a call that `parse` could not read back.
        """

    @abstractmethod
    def parse(self, ids: Iterable[int], tools: Iterable[ToolSpec] = ()) -> AssistantMessage:
        """Parses the output of `render_assistant` or any other ids: bad calls become MalformedToolCall, nothing raises.

        The message ends at the first of `end_tokens`; later ids are ignored. Other control tokens are shown by name.

        tools: their schemas say what the arguments are, in formats that write strings without quotes.
        """

    def content_reader(self, is_thinking: Callable[[], bool]) -> ContentReader:
        """Returns a reader of one message. is_thinking: whether what it returned so far ends inside thinking."""
        return TextReader(self.tokenizer, self.end_tokens, is_thinking)

    def close(self, sampled: Sequence[int]) -> list[int]:
        """Returns the ids between a sampled message and the next: `end` unless it was sampled, then the separator.

        A message that was cut off, or that another of `end_tokens` ended, gets the `end` that the format needs.
        """
        return [] if self.end in sampled else [self.end]

    @abstractmethod
    def bridge(self, sampled: Sequence[int], answers: Sequence[str]) -> list[list[int]]:
        """Returns the ids that follow a sampled message with calls: one list per answer, to be joined in order.

        answers: the results of the first calls, in the order of the calls. The first list begins with `close`.

        Raises ValueError for more answers than calls.
        """

    @abstractmethod
    def user(self, parts: Sequence[str | Sequence[int]], follows: Sequence[int] = ()) -> list[int]:
        """Returns a user message that follows another message of the harness, such as the answer of a tool.

        follows: the ids before it, if they may be a sampled message that ended with the first id of this one.

        Its body may mix text with ids that were sampled earlier, such as a summary. The ids are kept, except for
        control tokens: a body can neither open nor close a message.
        """

    def without_thinking(self, sampled: Sequence[int]) -> list[int]:
        """Returns the ids that follow what the model thought; all of them if it did not think or did not finish."""
        return list(sampled)

    def thinking_length(self, sampled: Sequence[int]) -> int:
        """Returns how many of the first ids are what the model thought, markers included: all if it did not finish."""
        return 0

    def user_body(self, ids: Sequence[int]) -> list[int]:
        """Returns the ids of the body of a message that `user` made."""
        empty = self.user([""])
        heads = (n for n in range(len(empty), -1, -1) if ids[:n] == empty[:n])
        head = next(n for n in heads if ids[len(ids) - (len(empty) - n) :] == empty[n:])
        return list(ids[head : len(ids) - (len(empty) - head)])

    def user_text(self, ids: Sequence[int]) -> str:
        """Returns the text of the body of a message that `user` made."""
        return self.tokenizer.decode(self.user_body(ids))

    def text(self, ids: Sequence[int]) -> str:
        """Returns ids of messages as text to read: no control tokens, and no headings that the format can recognise."""
        return self.tokenizer.decode(self.without_control(ids))

    def answer_text(self, ids: Sequence[int]) -> str:
        """Returns the text of the answer in one of the lists of `bridge`."""
        return self.text(ids)

    def encode_parts(self, parts: Sequence[str | Sequence[int]]) -> list[int]:
        """Returns the ids of a body of texts and sampled ids, as `user` takes it."""
        ids: list[int] = []
        for part in parts:
            if isinstance(part, str):
                ids += self.tokenizer.encode(part)
            else:
                ids += self.without_control(part)
        return ids

    def without_control(self, ids: Iterable[int]) -> list[int]:
        """Returns the ids that are not control tokens."""
        return [i for i in ids if not self.tokenizer.is_control(i)]


def declarations(tools: Iterable[ToolSpec]) -> list[dict[str, Any]]:
    """Returns the tools as chat templates and JSON APIs declare them: a list of functions."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
        }
        for tool in tools
    ]


def end_tokens(end: int, tok: ModelTokenizer) -> tuple[int, ...]:
    """Returns `end` and the other ids at which the model's own config ends what it generates."""
    return tuple(dict.fromkeys((end, *tok.end_ids)))


def rendered_calls(message: AssistantMessage) -> list[ToolCall]:
    """Returns the calls of a message to render. Raises ValueError if one of them is malformed."""
    calls: list[ToolCall] = []
    for call in message.calls:
        if isinstance(call, MalformedToolCall):
            raise ValueError(f"a malformed call cannot be rendered: {call.text[:80]!r} ({call.reason})")
        calls.append(call)
    return calls


def check_answers(asked: int, answers: int) -> None:
    """Raises ValueError for more answers than calls."""
    if answers > asked:
        raise ValueError(f"{answers} answers to {asked} calls; every answer belongs to a call")
