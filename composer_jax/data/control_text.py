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
        """The value (JSON-like) with `mark` wherever it could make, or be a part of, a control token.

        In keys only whole control tokens are broken: a template looks for them.
        """
        if isinstance(value, str):
            return self._at_the_ends(value, mark) + self.broken(value, mark) + self._at_the_ends(value, mark)
        if isinstance(value, dict):
            return {self.broken(key, mark): self.guard(item, mark) for key, item in value.items()}
        return [self.guard(item, mark) for item in value] if isinstance(value, list) else value

    def broken(self, value: Any, mark: str) -> Any:
        """The value (JSON-like) with `mark` in every control token that one of its strings spells."""
        if isinstance(value, str):
            cuts = [match.start() + 1 for match in self._begins.finditer(value)]
            return mark.join(value[start:end] for start, end in zip([0, *cuts], [*cuts, len(value)], strict=True))
        if isinstance(value, dict):
            return {self.broken(key, mark): self.broken(item, mark) for key, item in value.items()}
        return [self.broken(item, mark) for item in value] if isinstance(value, list) else value

    def ids(self, text: str, mark: str) -> list[int]:
        """The ids of text that a template made of guarded values."""
        ids: list[int] = []
        at = 0
        for match in self._cut.finditer(text):
            ids += self._tok.encode(text[at : match.start()].replace(mark, ""))
            ids.append(self._ids[match.lastindex - 1])
            at = match.end()
        return ids + self._tok.encode(text[at:].replace(mark, ""))

    def _at_the_ends(self, text: str, mark: str) -> str:
        """`mark`, if the text could make a control token together with what a template writes next to it."""
        begins = any(text[-n:] in self._heads for n in range(1, self._longest))
        ends = any(text[:n] in self._tails for n in range(1, self._longest))
        within = bool(text) and any(text in control for control in self._tok.control)
        return mark if begins or ends or within else ""


def _pattern(tok: ModelTokenizer, text: str) -> str:
    token = tok.control[text]
    return (r"\s*" if token.lstrip else "") + re.escape(text) + (r"\s*" if token.rstrip else "")


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in [key, *_strings(item)]]
    return [text for item in value for text in _strings(item)] if isinstance(value, list | tuple) else []
