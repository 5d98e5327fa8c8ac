"""A message that a model of the harmony format sampled, in parts: what it thought, what it said, and its calls."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from composer_jax.data.chat.messages import THINKING
from composer_jax.data.model_tokenizer import ModelTokenizer

CONTROL = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>")
"""All control tokens of the format."""

_RECIPIENT = re.compile(r"(?:^|\s)to=(\S*)")
_AUTHOR = "assistant"  # of all messages of the model; as a recipient it is the model itself

Kind = Literal["thinking", "text", "call", "heading"]


@dataclass
class HarmonyPart:
    """The ids from one <|start|> to the next. The first part lacks <|start|>assistant, which the prompt holds."""

    opened: bool
    """Whether it begins with <|start|>."""
    heading: list[int] = field(default_factory=list)
    """The ids before <|message|>."""
    body: list[int] | None = None
    """The ids after <|message|>; None without it."""
    end: int | None = None
    """The id that ended it; None if it was cut off, or if the next part began without one."""
    length: int = 0
    """Number of all its ids."""


class PartReader:
    """Divides sampled ids into parts, one id at a time."""

    def __init__(self, tok: ModelTokenizer, end_tokens: Sequence[int]) -> None:
        self.tokenizer, self.end_tokens = tok, frozenset(end_tokens)
        self._start, self._channel, self._message, _, end, *_ = (tok.id_of(text) for text in CONTROL)
        self._ends = self.end_tokens | {end}
        self.part = HarmonyPart(opened=False)

    def add(self, token: int) -> HarmonyPart:
        """Returns the part that the next id belongs to, with the id."""
        if token == self._start or self.part.end is not None:
            self.part = HarmonyPart(opened=token == self._start)
        part = self.part
        part.length += 1
        if token in self._ends:
            part.end = token
        elif token == self._message and part.body is None:
            part.body = []
        elif part.body is not None:
            part.body.append(token)
        elif token != self._start:
            part.heading.append(token)
        return part

    def read(self, part: HarmonyPart) -> tuple[Kind, str]:
        """Returns the kind of a part, and the recipient of a call, "" for other parts.

        A part on an unknown channel is text, and so is a first part without any, even if it lacks <|message|>. Another
        part without <|message|> was cut off inside its heading.
        """
        author, channel, pieces = "", None, []
        before = None
        for name, run in groupby(part.heading, self.tokenizer.names.get):
            if name is None:
                pieces.append(self.tokenizer.decode(run))
                if before is None:
                    author = pieces[-1]
                elif before == self._channel:
                    channel = (pieces[-1].split() or [""])[0]
            else:
                before = list(run)[-1]
        named = self._channel in part.heading or part.body is not None or part.opened
        matches = map(_RECIPIENT.search, pieces) if named else [_RECIPIENT.match(author)]
        recipient = next((match[1] for match in matches if match), _AUTHOR)
        if recipient != _AUTHOR:
            return "call", recipient
        if part.body is None:
            return ("heading" if named else "text"), ""
        return ("thinking" if channel == "analysis" else "text"), ""


def divide(tok: ModelTokenizer, end_tokens: Sequence[int], ids: Iterable[int]) -> list[tuple[Kind, str, HarmonyPart]]:
    """Returns the parts of a sampled message, up to its end, with what PartReader.read says of them."""
    reader = PartReader(tok, end_tokens)
    parts: list[HarmonyPart] = []
    for i in ids:
        part = reader.add(i)
        if not parts or part is not parts[-1]:
            parts.append(part)
        if part.end in reader.end_tokens:
            break
    return [(*reader.read(part), part) for part in parts]


class HarmonyReader:
    """The content of a message while it is sampled, as HarmonyFormat.parse will read it (content_reader.ContentReader).

    Thinking that follows other text is left to `parse`, which puts all thinking first. One id costs a constant time.
    """

    def __init__(self, reader: PartReader) -> None:
        self._reader = reader
        self._thinks = self._talks = self._ended = False
        self._kind: Kind = "heading"
        self._part: HarmonyPart | None = None  # the one that `_kind` belongs to

    def add(self, token: int) -> tuple[str, list[int]]:
        """See content_reader.ContentReader.add."""
        if self._ended:
            return "", []
        before = self._reader.part
        part = self._reader.add(token)
        self._ended = part.end in self._reader.end_tokens
        if part is not before:
            if before.body is None and before.end is None and before.heading:
                return self._show(before, before.heading)
            return "", []
        if part.body is None:
            return self._show(part, part.heading) if part.end is not None else ("", [])
        return self._show(part, part.body[-1:]) if part.body and part.end is None else ("", [])

    def _show(self, part: HarmonyPart, ids: list[int]) -> tuple[str, list[int]]:
        """The ids, and what separates them from those before; nothing for other parts than thinking and text."""
        separator = ""
        if ids and part is not self._part:
            self._part, (self._kind, _) = part, self._reader.read(part)
            if self._kind == "thinking" and not self._talks:
                separator = "\n" if self._thinks else f"{THINKING[0]}\n"
                self._thinks = True
            elif self._kind == "text":
                separator = "\n" if self._talks else f"\n{THINKING[1]}\n\n" if self._thinks else ""
                self._talks = True
        shown = self._kind == "text" or (self._kind == "thinking" and not self._talks)
        return (separator, list(ids)) if ids and shown else ("", [])
