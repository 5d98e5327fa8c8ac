"""Text rendered by a template -> ids, such that only control tokens of the template itself become control tokens.

A template mixes its own control tokens with messages of users and tools. The messages are therefore guarded first: a
mark is put into every place that spells a control token or could be a part of one, and removed when text is encoded.
"""

import re
from collections.abc import Sequence
from itertools import count
from typing import Any

from composer_jax.data.chat.messages import THINKING
from composer_jax.data.model_tokenizer import ModelTokenizer

_WORD = "composer"  # stands for any text that does not end with a control token


class ControlText:
    """Cuts text at the control tokens of a tokenizer."""

    def __init__(self, tok: ModelTokenizer) -> None:
        self._tok = tok
        spelled = sorted(
            tok.control, key=len, reverse=True
        )  # of alternatives that start at one place, re takes the first
        self._spelling = _any_of(spelled)
        self._spelling_in_said = _any_of([text for text in spelled if text not in THINKING])
        self._longest = max(map(len, spelled), default=1)
        self._spaced = any(text != text.strip() for text in spelled)
        self._spelled = tuple(spelled)
        self._absorbing = tuple(text for text in spelled if tok.control[text].rstrip)
        self._heads = {text[:n] for text in spelled for n in range(1, len(text))}
        self._tails = {text[n:] for text in spelled for n in range(1, len(text))}

    def mark(self, *values: Any) -> str:
        """Returns a mark that occurs in none of the values (JSON-like) and in no control token."""
        text = "".join([*_strings(values), *self._tok.control])
        return next(mark for n in count() if (mark := f"Zq{n}x") not in text)

    def guard(self, value: Any, mark: str) -> Any:
        """Returns the value (JSON-like) with `mark` wherever it contains, or could be a part of, a control token.

        In keys, which templates look up, the mark is put into whole control tokens only.
        """
        if isinstance(value, str):
            return self._enclosed(value, self._spelling, mark)
        if isinstance(value, dict):
            return {self.broken(key, mark): self.guard(item, mark) for key, item in value.items()}
        return [self.guard(item, mark) for item in value] if isinstance(value, list) else value

    def guard_said(self, content: str, mark: str) -> str:
        """Returns the content of a model's own message, guarded except for THINKING, which a model may write."""
        return self._enclosed(content, self._spelling_in_said, mark)

    def broken(self, value: Any, mark: str) -> Any:
        """Returns the value (JSON-like) with `mark` inside every control token that one of its strings spells."""
        if isinstance(value, str):
            return _cut(value, mark, self._spelling)
        if isinstance(value, dict):
            return {self.broken(key, mark): self.broken(item, mark) for key, item in value.items()}
        return [self.broken(item, mark) for item in value] if isinstance(value, list) else value

    def ids(self, text: str, mark: str, before: str = _WORD) -> list[int]:
        """Returns the ids of text that a template rendered from guarded values.

        before: the text before it, rendered likewise, of which the end matters; "" at the beginning of a conversation.
        """
        encode = self._tok.encode if before else self._tok.encode_document
        if before.endswith(self._spelled) or before.rstrip().endswith(self._absorbing):
            encode = self._tok.encode_after_control
        ids: list[int] = []
        at = 0
        while (match := self._spelling.search(text, at)) is not None:
            token, piece = self._tok.control[match[0]], text[at : match.start()]
            ids += encode((piece.rstrip() if token.lstrip else piece).replace(mark, ""))
            ids.append(token.id)
            at, encode = match.end(), self._tok.encode_after_control
            while token.rstrip and text[at : at + 1].isspace():
                at += 1
        return ids + encode(text[at:].replace(mark, ""))

    def _enclosed(self, text: str, spelling: re.Pattern[str], mark: str) -> str:
        """The text with `mark` at its ends, if it needs it, and after the first character of each match."""
        core = text if self._spaced else text.strip()  # templates strip white space, which begins no control token
        ends = self._at_the_ends(core, mark)
        before, _, after = text.partition(core) if core else (text, "", "")
        return f"{before}{ends}{_cut(core, mark, spelling)}{ends}{after}"

    def _at_the_ends(self, text: str, mark: str) -> str:
        """Returns `mark` if the text could form a control token with the template's text next to it, else ""."""
        begins = any(text[-n:] in self._heads for n in range(1, self._longest))
        ends = any(text[:n] in self._tails for n in range(1, self._longest))
        within = bool(text) and any(text in control for control in self._tok.control)
        return mark if begins or ends or within else ""


def _any_of(spelled: Sequence[str]) -> re.Pattern[str]:
    """Matches one of the texts; nothing without any.

    With nothing around the alternatives, re only tries them where one can begin: tokenizers have up to thousands.
    """
    return re.compile("|".join(map(re.escape, spelled)) if spelled else r"(?!)")


def _cut(text: str, mark: str, spelling: re.Pattern[str]) -> str:
    """Returns the text with `mark` after the first character of each match, also of those that overlap."""
    cuts, at = [0], 0
    while (match := spelling.search(text, at)) is not None:
        at = match.start() + 1
        cuts.append(at)
    return mark.join(text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True))


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in [key, *_strings(item)]]
    return [text for item in value for text in _strings(item)] if isinstance(value, list | tuple) else []
