"""Application of hunks to a text: the old lines must match exactly, their position may differ from the patch's.

Lines that match nowhere as they are written are looked for as read_file shows them: without line ends and undecodable
bytes, which the file then keeps.
"""

import re
from collections.abc import Sequence
from functools import cached_property

from composer_jax.agent.patches.file_text import BOM, ShownLines, fit_lines, line_end, normal_line, with_line_ends
from composer_jax.agent.similar_lines import describe_similar_lines
from composer_jax.tasks.patches import Hunk, PatchError, split_lines

_LINE = re.compile(r"[^\n]*\n|[^\n]+")


def apply_hunks(text: str, hunks: Sequence[Hunk]) -> str:
    """The text with all hunks applied.

    A hunk is applied at its line number if its old lines are there, else at the only place behind the previous hunk
    where they are; hunks that all have line numbers are ordered by them. The text keeps its byte order mark unless the
    old lines begin with it. Raises PatchError unless there is exactly one place; its sentence starts with "hunk N".
    """
    mark = BOM if text.startswith(BOM) and not any(line.startswith(BOM) for hunk in hunks for line in hunk.old) else ""
    file = _PatchedText(text.removeprefix(mark))
    done, pieces = 0, []
    numbered = list(enumerate(hunks, 1))
    if all(hunk.start is not None for hunk in hunks):
        numbered.sort(key=lambda pair: pair[1].start or 0)
    for number, hunk in numbered:
        start, end, new = file.locate(done, hunk, f"hunk {number}")
        pieces += [file.text[done:start], new]
        done = end
    after = "".join([*pieces, file.text[done:]])
    return mark + after if after else after


class _LineOffsets:
    """A text and the offsets between its lines, which end with LF."""

    def __init__(self, text: str) -> None:
        self.text = text

    def after(self, lines: int) -> int | None:
        """The offset after `lines` lines, the last of which may have no end; None if there are fewer."""
        return self._ends[lines] if 0 <= lines < len(self._ends) else None

    @cached_property
    def _ends(self) -> list[int]:
        return [0, *(line.end() for line in _LINE.finditer(self.text))]


class _PatchedText:
    """The text that hunks are applied to. Offsets called `at`, `low` and `start` are of the shown text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lines = _LineOffsets(text)

    @cached_property
    def shown(self) -> ShownLines:
        return ShownLines(self.text)

    @cached_property
    def _shown_lines(self) -> _LineOffsets:
        return _LineOffsets(self.shown.text)

    def locate(self, done: int, hunk: Hunk, name: str) -> tuple[int, int, str]:
        """(start, end) of the replaced text behind offset `done` of the file, and the new text."""
        hunks = [hunk, hunk.without_edge_blanks()] if any(hunk.edge_blanks) else [hunk]
        for one in hunks:
            place = self._replace(done, one, name) if one.old else self._insert(done, one, name)
            if place is not None:
                return place
        raise self._misfit(done, hunk, name)

    def _replace(self, done: int, hunk: Hunk, name: str) -> tuple[int, int, str] | None:
        """The place of old lines as they are written, else as they are shown; None if there is none."""
        old, new = "".join(hunk.old), "".join(hunk.new)
        start = _search(self._lines, done, old, hunk, name)
        if start is not None:
            return start, start + len(old), new
        shown = self.shown
        old_lines = [part for line in hunk.old for part in split_lines(line)]
        old = "".join(map(normal_line, old_lines))
        at = _search(self._shown_lines, shown.from_file(done), old, hunk, name)
        if at is None:
            return None
        start, end = shown.to_file(at), shown.to_file(at + len(old))
        replaced = self.text[start:end]
        lines = [part for line in hunk.new for part in split_lines(line)]
        above = shown.line_end_at(at) or "\n"
        open_end = end == len(self.text) and not line_end(replaced)
        new = fit_lines(split_lines(replaced), lines, _signs(hunk), above, open_end)
        if new == replaced and hunk.old != hunk.new:
            raise PatchError(f"{name} changes only line ends, which are not those of the file; change them with shell")
        return start, end, new

    def _insert(self, done: int, hunk: Hunk, name: str) -> tuple[int, int, str] | None:
        """The place of a hunk without old lines; None if its anchors are not in the text."""
        shown, new = self.shown, "".join(hunk.new)
        low = _skip_anchors(shown.text, shown.from_file(done), hunk.anchors)
        if low is None:
            return None
        start = self._insertion(done, shown.to_file(low), hunk, name)
        above = shown.line_end_at(shown.from_file(start))
        if "\r" not in new:  # no old line tells which line ends the patch is written with
            new = with_line_ends(new, above)
        if start == len(self.text) and self.text and not line_end(self.text):
            above = above or "\n"  # the last line had no end, and the new last line has none
            return start, start, above + new.removesuffix(above)
        return start, start, new

    def _insertion(self, done: int, low: int, hunk: Hunk, name: str) -> int:
        """The offset of the file at which a hunk without old lines inserts."""
        if hunk.start is not None:
            start = self._lines.after(hunk.start)
            if start is not None and start >= done:
                return start
            raise PatchError(
                f"{name} does not fit: the file has no end of line {hunk.start} behind the hunk before it; "
                "give it a line of context"
            )
        if hunk.anchors:
            return low
        if hunk.at_end or not self.text:
            return len(self.text)
        raise PatchError(f"{name} only adds lines and does not say where; give it a line of context")

    def _misfit(self, done: int, hunk: Hunk, name: str) -> PatchError:
        """What of a hunk is not in the text behind offset `done`, and what is similar."""
        text, low = self.shown.text, self.shown.from_file(done)
        for anchor in hunk.anchors:
            below = _skip_anchors(text, low, (anchor,))
            if below is None:
                return PatchError(
                    f"{name} does not fit: no line starts with its @@ {anchor[:80]!r}; copy the line from the file, "
                    "or write @@ alone"
                )
            low = below
        old = [normal_line(part) for line in hunk.old for part in split_lines(line)]
        where = f" behind line {text.count(chr(10), 0, low)}" if low else ""
        lines = set(text[low:].split("\n"))
        missing = next((line for line in old if line.removesuffix("\n") not in lines), None)
        which = (
            f", such as {missing.removesuffix(chr(10))[:80]!r}"
            if missing
            else " as its last"
            if hunk.at_end
            else " in this order"
        )
        similar = describe_similar_lines(text[low:], "".join(old)) or "; copy them from the file"
        return PatchError(f"{name} does not fit: its old lines are not in the file{where}{which}{similar}")


def _search(lines: _LineOffsets, low: int, old: str, hunk: Hunk, name: str) -> int | None:
    """The offset of the old lines in a text, at `low` or behind it; None if they are not there.

    Raises PatchError if they are in several places.
    """
    text = lines.text
    below = _skip_anchors(text, low, hunk.anchors)
    if below is None:
        return None
    low = below
    if hunk.at_end:
        start = len(text) - len(old)
        return start if start >= low and text.endswith(old) and _starts_line(text, start) else None
    if hunk.anchors and sum(hunk.edge_blanks) == len(hunk.old):  # context only if they are right below the anchors
        return low if text.startswith(old, low) and _ends_line(text, low + len(old)) else None
    if hunk.start is not None:
        start = lines.after(hunk.start - 1)
        if start is not None and start >= low and text.startswith(old, start) and _ends_line(text, start + len(old)):
            return start
    starts: list[int] = []
    start = text.find(old, low)
    while start >= 0 and len(starts) < 2:
        if _starts_line(text, start) and _ends_line(text, start + len(old)):
            starts.append(start)
            if hunk.anchors:  # the first place below the anchors counts
                break
        start = text.find(old, start + 1)
    if len(starts) > 1:
        numbers = " and ".join(str(text.count("\n", 0, start) + 1) for start in starts)
        raise PatchError(f"{name} fits in several places, such as lines {numbers}; give it more lines of context")
    return starts[0] if starts else None


def _skip_anchors(text: str, low: int, anchors: Sequence[str]) -> int | None:
    """The offset of the line below the anchors, which are beginnings of lines in this order; None without them."""
    for anchor in anchors:
        while low < len(text):
            end = text.find("\n", low) + 1 or len(text)
            line, low = text[low:end].strip(), end
            if line.startswith(anchor):
                break
        else:
            return None
    return low


def _starts_line(text: str, at: int) -> bool:
    return at == 0 or text[at - 1] == "\n"


def _ends_line(text: str, at: int) -> bool:
    return at == len(text) or text[at - 1] == "\n"


def _signs(hunk: Hunk) -> str:
    """The signs of a hunk's lines, where a line with a CR within it counts as several."""
    if not hunk.signs:
        sizes = [sum(len(split_lines(line)) for line in side) for side in (hunk.old, hunk.new)]
        return "-" * sizes[0] + "+" * sizes[1]
    old, new, signs = iter(hunk.old), iter(hunk.new), []
    for sign in hunk.signs:
        line = next(new) if sign == "+" else next(old)
        if sign == " ":
            next(new)
        signs.append(sign * len(split_lines(line)))
    return "".join(signs)
