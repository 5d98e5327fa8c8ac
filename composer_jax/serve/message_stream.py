"""MessageStream: what sampled ids say, while they are sampled: content, reasoning, and at the end the tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from composer_jax.data.chat.call_forms import CALL
from composer_jax.data.chat.chat_format import ChatFormat, ToolSpec
from composer_jax.data.chat.messages import THINKING, MalformedToolCall, ToolCall
from composer_jax.data.chat.thinking import split_thinking
from composer_jax.sampler.detokenizer import Decode, IncrementalDetokenizer


@dataclass(frozen=True)
class MessageDelta:
    """What newer ids add to a message."""

    content: str = ""
    reasoning: str = ""


@dataclass(frozen=True)
class ParsedMessage:
    """A whole message."""

    content: str
    reasoning: str
    calls: list[ToolCall] = field(default_factory=list)


class TextStream:
    """The text of a completion, in pieces, up to the first of some stop strings."""

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._detokenizer, self._stop = IncrementalDetokenizer(decode), stop
        self._text, self._shown = "", 0

    def add(self, ids: Sequence[int]) -> str:
        """Returns the text that these ids complete and that no stop string can remove any more."""
        self._text += self._detokenizer.add(ids)
        return self._show(_without_beginning(text_before(self._text, self._stop), self._stop))

    def finish(self) -> str:
        """Returns what is left."""
        self._text += self._detokenizer.finish()
        return self._show(text_before(self._text, self._stop))

    def _show(self, text: str) -> str:
        piece = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return piece


class MessageStream:
    """A message of the model in a chat format.

    Text is shown as soon as it cannot be part of a call or of a stop string; calls are read when the message is whole.
    The deltas of `add` and of `finish`, joined, are the content and the reasoning of the ParsedMessage.
    """

    def __init__(self, chat: ChatFormat, stop: Sequence[str] = (), tools: Sequence[ToolSpec] = ()) -> None:
        """tools: whose schemas say what the arguments of calls are."""
        self._chat, self._stop, self._tools = chat, stop, tools
        opening = chat.tokenizer.decode(chat.generation_prompt)
        self._thinks = chat.reads_thinking and THINKING[0] in opening and THINKING[1] not in opening
        self._detokenizer = IncrementalDetokenizer(chat.tokenizer.decode)
        self._ids: list[int] = []
        self._text = ""
        self._content, self._reasoning = "", ""  # what was shown
        self._reader = chat.content_reader(self._is_thinking)

    def add(self, ids: Sequence[int]) -> MessageDelta:
        """Returns what these ids add."""
        for i in ids:
            self._ids.append(i)
            text, shown = self._reader.add(i)
            if text:
                self._text += self._detokenizer.finish() + text
                self._detokenizer = IncrementalDetokenizer(self._chat.tokenizer.decode)
            self._text += self._detokenizer.add(shown) if shown else ""
        text = self._text.removeprefix(self._chat.lead)
        if self._chat.lead.startswith(self._text):  # more of it can come
            text = ""
        text = text_before(text, self._stop)
        if not self._is_thinking():
            start = max(0, text.find(THINKING[1])) if self._has_thought() else 0
            text = text[:start] + text_before(text[start:], CALL[:1])
        text = _without_beginning(text, (*self._stop, CALL[0], *THINKING)).rstrip()
        return self._grow(*self._split(text, self._thinks))

    def _has_thought(self) -> bool:
        """Whether the text begins with what the model thinks."""
        return self._thinks or (self._chat.reads_thinking and self._text.lstrip().startswith(THINKING[0]))

    def _is_thinking(self) -> bool:
        """Whether the text ends inside what the model thinks."""
        return self._has_thought() and THINKING[1] not in self._text

    def _split(self, text: str, thinks: bool) -> tuple[str, str]:
        """What the model thought, and what it said."""
        return split_thinking(text, thinks) if self._chat.reads_thinking else ("", text)

    def finish(self) -> tuple[MessageDelta, ParsedMessage]:
        """Returns what is left to show, and the whole message."""
        parsed = self._chat.parse(self._ids, self._tools)
        reasoning, content = self._split(text_before(parsed.content, self._stop), thinks=False)
        calls = []
        for call in parsed.calls:
            if isinstance(call, MalformedToolCall):  # the client cannot read it as a call, and must see what was said
                content += call.text
            else:
                calls.append(call)
        piece = self._grow(reasoning, content)
        return piece, ParsedMessage(self._content, self._reasoning, calls)

    def _grow(self, reasoning: str, content: str) -> MessageDelta:
        """Shows what goes beyond what was shown."""
        more_content = content[len(self._content) :] if content.startswith(self._content) else ""
        more_reasoning = reasoning[len(self._reasoning) :] if reasoning.startswith(self._reasoning) else ""
        self._content += more_content
        self._reasoning += more_reasoning
        return MessageDelta(more_content, more_reasoning)


def text_before(text: str, marks: Sequence[str]) -> str:
    """Returns the text before the first of some marks."""
    places = [place for mark in marks if (place := text.find(mark)) >= 0]
    return text[: min(places)] if places else text


def _without_beginning(text: str, marks: Sequence[str]) -> str:
    """Returns the text without an end that is the beginning of a mark."""
    longest = max(
        (n for mark in marks for n in range(1, min(len(mark), len(text) + 1)) if text.endswith(mark[:n])), default=0
    )
    return text[: len(text) - longest]
