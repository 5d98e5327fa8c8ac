"""The model of a diff (files and hunks), the difference of two texts as hunks, and the merge of versions of a text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from itertools import pairwise

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


class PatchError(Exception):
    """A text that is not a patch, or a patch that does not fit; one sentence for the model."""


@dataclass(frozen=True)
class Hunk:
    """Old lines and the new lines that replace them.

    old, new: lines with their line breaks; the last line of a file may lack one.
    start: number of the first old line, from 1; where `old` is empty, the number of the line above the insertion.
      None if the patch does not state it.
    anchors: lines somewhere above the hunk, in order.
    at_end: whether the old lines are the last of the file.
    edge_blanks: the numbers of blank lines without a sign at the hunk's beginning and end. They are context where the
      file has them there, and otherwise separators between hunks. `old` and `new` hold them.
    signs: " ", "-" or "+" for every line in the order of the patch; "" if the patch states old and new lines only.
    """

    old: tuple[str, ...]
    new: tuple[str, ...]
    start: int | None = None
    anchors: tuple[str, ...] = ()
    at_end: bool = False
    edge_blanks: tuple[int, int] = (0, 0)
    signs: str = field(default="", compare=False)

    @classmethod
    def from_lines(
        cls, signed: Sequence[tuple[str, str]], start: int | None, anchors: tuple[str, ...] = (), at_end: bool = False
    ) -> "Hunk":
        """The hunk of (sign, line) pairs; the sign "" marks a blank line to which the patch gives none."""
        blanks = [not sign for sign, _ in signed]
        head = next((at for at, blank in enumerate(blanks) if not blank), len(blanks))
        tail = next((at for at, blank in enumerate(reversed(blanks[head:])) if not blank), 0)
        return cls(
            tuple(line for sign, line in signed if sign != "+"),
            tuple(line for sign, line in signed if sign != "-"),
            start,
            anchors,
            at_end,
            edge_blanks=(head, tail),
            signs="".join(sign or " " for sign, _ in signed),
        )

    def without_edge_blanks(self) -> "Hunk":
        """The hunk whose blank lines at both ends are separators."""
        head, tail = self.edge_blanks
        return replace(
            self,
            old=self.old[head : len(self.old) - tail],
            new=self.new[head : len(self.new) - tail],
            edge_blanks=(0, 0),
            signs=self.signs[head : len(self.signs) - tail],
        )

    @property
    def old_range(self) -> tuple[int, int]:
        """The replaced lines as a half-open range from 0; `start` must be set."""
        if self.start is None:
            raise ValueError("the hunk does not state where it starts")
        first = self.start - 1 if self.old else self.start
        return first, first + len(self.old)


@dataclass(frozen=True)
class FilePatch:
    """The change of one file.

    old_path, new_path: its path before and after; old_path is None for a created file, new_path for a deleted one.
    executable: the mode that the patch sets, executable or not; None leaves the mode as it is.
    """

    old_path: str | None
    new_path: str | None
    hunks: tuple[Hunk, ...] = ()
    executable: bool | None = None

    @property
    def path(self) -> str:
        """The path after the change, or that of the deleted file."""
        return self.new_path or self.old_path or ""


def split_lines(text: str) -> list[str]:
    """The lines of `text` as Python counts them, each with its line end; joined they are `text`."""
    return _LINE.findall(text)


def diff_lines(old: Sequence[str], new: Sequence[str]) -> list[Hunk]:
    """The hunks that turn the lines `old` into `new`, in order, without context and without overlap."""
    # The matcher is quadratic; almost every change is a few lines of a large file.
    start, end_old, end_new = 0, len(old), len(new)
    while start < min(end_old, end_new) and old[start] == new[start]:
        start += 1
    while min(end_old, end_new) > start and old[end_old - 1] == new[end_new - 1]:
        end_old, end_new = end_old - 1, end_new - 1
    matcher = SequenceMatcher(None, old[start:end_old], new[start:end_new], autojunk=False)
    return [
        Hunk(tuple(old[start + a : start + b]), tuple(new[start + c : start + d]), start + a + (b > a))
        for tag, a, b, c, d in matcher.get_opcodes()
        if tag != "equal"
    ]


def merge_versions(base: Sequence[str], versions: Sequence[Sequence[str]]) -> str | None:
    """The text of `base` with the changes of all `versions`, or None where two of them touch the same place.

    Hunks without a line between them touch: their order is not known.
    """
    hunks = sorted((hunk for version in versions for hunk in diff_lines(base, version)), key=lambda h: h.old_range)
    if any(later.old_range[0] <= earlier.old_range[1] for earlier, later in pairwise(hunks)):
        return None
    lines, done = [], 0
    for hunk in hunks:
        start, end = hunk.old_range
        lines += [*base[done:start], *hunk.new]
        done = end
    return "".join([*lines, *base[done:]])
