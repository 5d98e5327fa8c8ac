"""The text of sampled ids, in which control tokens are told from text that spells them; and the calls in it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from composer_jax.data.model_tokenizer import ModelTokenizer

if TYPE_CHECKING:
    from composer_jax.data.chat.call_forms import CallForm


class SampledText:
    """Text with the places of control tokens.

    text: as the tokenizer decodes the ids. controls: the place of each control token with its text, in order.
    tokens: the texts of all control tokens, which nothing else can spell.
    """

    def __init__(self, text: str, controls: list[tuple[int, str]], tokens: Iterable[str]) -> None:
        self.text, self.controls, self._tokens = text, controls, tokens

    @classmethod
    def of(cls, tok: ModelTokenizer, ids: Iterable[int]) -> SampledText:
        """Returns the text of any ids."""
        parts: list[str] = []
        controls: list[tuple[int, str]] = []
        length = 0
        for name, run in groupby(ids, tok.names.get):
            for part in [list(run)] if name is None else ([i] for i in run):
                if name is not None:
                    controls.append((length, name))
                parts.append(tok.decode(part))
                length += len(parts[-1])
        return cls("".join(parts), controls, tok.control)

    def find(self, marker: str, start: int = 0) -> int:
        """Returns where `marker` begins, at `start` or later; -1 if nowhere.

        A marker that is a control token is found as that token only.
        """
        if marker not in self._tokens:
            return self.text.find(marker, start)
        at = bisect_left(self.controls, start, key=lambda place: place[0])
        return next((place for place, name in self.controls[at:] if name == marker), -1)

    def part(self, start: int, stop: int) -> SampledText:
        """Returns the text from `start` to `stop`, neither of which is inside a control token."""
        controls = [(place - start, name) for place, name in self.controls if start <= place < stop]
        return SampledText(self.text[start:stop], controls, self._tokens)


@dataclass
class CallSpan:
    """What stands between the markers of a call. `closed`: whether the marker that finishes it was there."""

    body: SampledText
    closed: bool


@dataclass
class ScannedMessage:
    """A message in parts."""

    before: str
    """Text before the first marker of a call."""
    after: str
    """Later text outside of calls."""
    calls: list[CallSpan] = field(default_factory=list)


def scan_calls(text: SampledText, form: CallForm, start: int) -> ScannedMessage:
    """Splits a message into parts; calls begin at `start` or later.

    A marker in an argument has no meaning. The beginning of another call, and the end of the text, leave a call open.
    """
    outside: list[str] = []
    calls: list[CallSpan] = []
    at = 0
    place, marker = _first(text, (form.begin, form.finish, *form.around), start)
    while marker:
        if not (marker == form.finish and marker not in _names(text)):  # as ordinary text it means nothing by itself
            outside.append(text.text[at:place])
            at = place + len(marker)
        if marker == form.begin:
            end = form.body_end(text, at)
            place, marker = _first(text, (form.finish, form.begin, *form.around), end)
            stop = place if marker else len(text.text)
            calls.append(CallSpan(text.part(at, stop), marker == form.finish))
            at = stop + (len(marker) if marker == form.finish else 0)
            place, marker = _first(text, (form.begin, form.finish, *form.around), at)
        else:
            place, marker = _first(text, (form.begin, form.finish, *form.around), place + len(marker))
    first, *later = [*outside, text.text[at:]]
    return ScannedMessage(first, "".join(later), calls)


def _first(text: SampledText, markers: Iterable[str], start: int) -> tuple[int, str]:
    """Where the first of some markers is, and which; "" if none is there."""
    found = [(place, marker) for marker in markers if (place := text.find(marker, start)) >= 0]
    return min(found, default=(len(text.text), ""))


def _names(text: SampledText) -> set[str]:
    return {name for _, name in text.controls}
