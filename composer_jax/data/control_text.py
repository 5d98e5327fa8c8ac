"""Text that went through a template -> ids, such that only what the template itself wrote becomes control tokens.

A template mixes its own control tokens with what people and tools said. So what they said is broken before: where it
spells a control token, or could be a part of one, a mark is put in between; it is removed when the text is encoded.
"""

from __future__ import annotations

import re
from itertools import count
from typing import Any

from composer_jax.data.model_tokenizer import ModelTokenizer


class ControlText:
    """Cuts text at the control tokens of a tokenizer."""

    def __init__(self, tok: ModelTokenizer) -> None:
        self._tok = tok
        spelled = sorted(tok.control, key=len, reverse=True)  # the longest of those that begin at the same place
        self._ids = [tok.control[text].id for text in spelled]
        self._cut = re.compile("|".join(f"({_pattern(tok, text)})" for text in spelled))
        self._begins = re.compile(f"(?={'|'.join(map(re.escape, spelled))})")
        self._longest = max(map(len, spelled), default=1)
        self._heads = {text[:n] for text in spelled for n in range(1, len(text))}
        self._tails = {text[n:] for text in spelled for n in range(1, len(text))}

    def mark(self, *values: Any) -> str:
        """A mark that is in none of the values (JSON-like), and in no control token."""
        said = "".join([*_strings(values), *self._tok.control])
        return next(mark for n in count() if (mark := f"Zq{n}x") not in said)

    def guard(self, value: Any, mark: str) -> Any:
        """The value (JSON-like) with `mark` in every string that could make, or be a part of, a control token.

        Keys are what a template looks for: in them only whole control tokens are broken.
        """
        if isinstance(value, str):
            return self._guarded(value, mark)
        if isinstance(value, dict):
            return {self._broken(key, mark): self.guard(item, mark) for key, item in value.items()}
        return [self.guard(item, mark) for item in value] if isinstance(value, list) else value

    def ids(self, text: str, mark: str) -> list[int]:
        """The ids of text that a template made of guarded values."""
        ids: list[int] = []
        at = 0
        for match in self._cut.finditer(text):
            ids += self._tok.encode(text[at : match.start()].replace(mark, ""))
            ids.append(self._ids[match.lastindex - 1])
            at = match.end()
        return ids + self._tok.encode(text[at:].replace(mark, ""))

    def _broken(self, text: str, mark: str) -> str:
        """With `mark` in every control token that it spells."""
        cuts = [match.start() + 1 for match in self._begins.finditer(text)]
        return mark.join(text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True))

    def _guarded(self, text: str, mark: str) -> str:
        """The same, and `mark` at an end that could be a part of one together with what stands next to it."""
        shorter = range(1, self._longest)
        first = mark if any(text[:n] in self._tails for n in shorter) else ""
        last = mark if any(text[-n:] in self._heads for n in shorter) else ""
        return first + self._broken(text, mark) + last


def _pattern(tok: ModelTokenizer, text: str) -> str:
    token = tok.control[text]
    return (r"\s*" if token.lstrip else "") + re.escape(text) + (r"\s*" if token.rstrip else "")


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in [key, *_strings(item)]]
    return [text for item in value for text in _strings(item)] if isinstance(value, list | tuple) else []
