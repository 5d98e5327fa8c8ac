"""SampledText: the text of sampled ids, which knows where control tokens are. scan_calls: the calls in such a text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from composer_jax.data.model_tokenizer import ModelTokenizer

if TYPE_CHECKING:
    from composer_jax.data.chat.call_forms import CallForm


class SampledText:
    """Text in which control tokens have places.

    text: as the tokenizer decodes the ids. controls: the place of each control token with its text, in order.
    tokens: the texts of all control tokens, which nothing else can spell.
    """

    def __init__(self, text: str, controls: list[tuple[int, str]], tokens: Container[str]) -> None:
        self.text, self.controls, self.tokens = text, controls, tokens
        self._places: dict[str, list[int]] = {}
        for place, name in controls:
            self._places.setdefault(name, []).append(place)
        self._found: dict[str, tuple[int, int]] = {}  # marker of ordinary text -> where it was looked for, and found

    @classmethod
    def of(cls, tok: ModelTokenizer, ids: Iterable[int]) -> SampledText:
        """Returns the text of any ids."""
        parts: list[str] = []
        controls: list[tuple[int, str]] = []
        length = 0
        before: list[int] = []  # a control token, after which some tokenizers put a space
        for name, run in groupby(ids, tok.names.get):
            for part in [list(run)] if name is None else ([i] for i in run):
                if name is not None:
                    controls.append((length, name))
                parts.append(tok.decode([*before, *part]).removeprefix(tok.decode(before)))
                length += len(parts[-1])
                before = part if name is not None else []
        return cls("".join(parts), controls, tok.control)

    def find(self, marker: str, start: int = 0) -> int:
        """Returns where `marker` begins, at `start` or later; -1 if nowhere.

        A marker that is a control token is found as that token only. Searches from increasing places cost one pass.
        """
        if marker in self.tokens:
            places = self._places.get(marker, ())
            at = bisect_left(places, start)
            return places[at] if at < len(places) else -1
        looked, found = self._found.get(marker, (len(self.text) + 1, -1))
        if not (looked <= start and (found < 0 or start <= found)):
            found = self.text.find(marker, start)
            self._found[marker] = start, found
        return found

    def next_control(self, start: int) -> tuple[int, str]:
        """Returns (place, text) of the first control token at `start` or later; (end of the text, "") without one."""
        at = bisect_left(self.controls, start, key=lambda control: control[0])
        return self.controls[at] if at < len(self.controls) else (len(self.text), "")

    def part(self, start: int, stop: int) -> SampledText:
        """Returns the text from `start` to `stop`, neither of which is inside a control token."""
        first, last = (bisect_left(self.controls, place, key=lambda control: control[0]) for place in (start, stop))
        controls = [(place - start, name) for place, name in self.controls[first:last]]
        return SampledText(self.text[start:stop], controls, self.tokens)


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
    markers = (form.begin, form.finish, *form.around)
    # As ordinary text, the end of a call means nothing by itself.
    outer = markers if form.finish in text.tokens else tuple(m for m in markers if m != form.finish)
    outside: list[str] = []
    calls: list[CallSpan] = []
    at, (place, marker) = 0, _first(text, outer, start)
    while marker:
        outside.append(text.text[at:place])
        at = place + len(marker)
        if marker == form.begin:
            stop, ending = _first(text, markers, form.body_end(text, at))
            calls.append(CallSpan(text.part(at, stop), ending == form.finish))
            at = stop + (len(ending) if ending == form.finish else 0)
        place, marker = _first(text, outer, at)
    first, *later = [*outside, text.text[at:]]
    return ScannedMessage(first, "".join(later), calls)


def _first(text: SampledText, markers: Iterable[str], start: int) -> tuple[int, str]:
    """Where the first of some markers is, and which; the end of the text and "" if none is there."""
    found = [(place, marker) for marker in markers if (place := text.find(marker, start)) >= 0]
    return min(found, default=(len(text.text), ""))
