"""One way to break a repository, before any test has run: the files that change and what went away."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


@dataclass(frozen=True)
class Hunk:
    """Lines start..end (end excluded, from 0) of a text become `lines`."""

    start: int
    end: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Candidate:
    """A breakage of a repository. Compared by value; `id` is the same on every machine.

    kind: "mutate:compare_flip", "stub", "delete_feature", "delete_file", "combine", "revert_commit".
    files: relative posix path -> the new text, of every file that changes; None where it is deleted.
    entities: "path::Qual.name" of what was changed. removed: the old lines that are no longer there, one text
    per block of consecutive lines, in the order of paths and lines. note: one line for people.
    """

    kind: str
    files: Mapping[str, str | None]
    entities: tuple[str, ...]
    removed: tuple[str, ...]
    note: str

    @property
    def id(self) -> str:
        """16 hexadecimal digits of kind and files, whatever the order of the mapping."""
        text = json.dumps([self.kind, sorted(self.files.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def candidate(
    kind: str, sources: Mapping[str, str], files: Mapping[str, str | None], entities: Sequence[str], note: str
) -> Candidate:
    """A candidate of what `files` makes of `sources`; `removed` is read off the difference."""
    removed: list[str] = []
    for path in sorted(files):
        old = split_lines(sources.get(path, ""))
        hunks = difference(old, split_lines(files[path] or ""))
        removed += ["".join(old[hunk.start : hunk.end]) for hunk in hunks if hunk.end > hunk.start]
    return Candidate(kind, dict(sorted(files.items())), tuple(entities), tuple(removed), note)


def split_lines(text: str) -> list[str]:
    """The lines of `text` as Python counts them, each with its line end; joined they are `text`."""
    return _LINE.findall(text)


def difference(old: Sequence[str], new: Sequence[str]) -> list[Hunk]:
    """The hunks, in order and apart from each other, that make `new` of `old`."""
    # The matcher is quadratic; almost every change is a few lines of a large file.
    start, end_old, end_new = 0, len(old), len(new)
    while start < min(end_old, end_new) and old[start] == new[start]:
        start += 1
    while min(end_old, end_new) > start and old[end_old - 1] == new[end_new - 1]:
        end_old, end_new = end_old - 1, end_new - 1
    matcher = SequenceMatcher(None, old[start:end_old], new[start:end_new], autojunk=False)
    return [
        Hunk(start + a, start + b, tuple(new[start + c : start + d]))
        for tag, a, b, c, d in matcher.get_opcodes()
        if tag != "equal"
    ]


def merge(old: Sequence[str], changes: Sequence[Sequence[str]]) -> str | None:
    """`old` with every one of the `changes` made to it, or None where two of them touch the same place.

    Hunks that meet without a line between them count as touching: which order they belong in is not known.
    """
    hunks = sorted((hunk for new in changes for hunk in difference(old, new)), key=lambda hunk: (hunk.start, hunk.end))
    if any(later.start <= earlier.end for earlier, later in pairwise(hunks)):
        return None
    lines, at = [], 0
    for hunk in hunks:
        lines += [*old[at : hunk.start], *hunk.lines]
        at = hunk.end
    return "".join([*lines, *old[at:]])
