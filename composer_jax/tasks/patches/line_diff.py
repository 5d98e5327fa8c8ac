"""The difference of two texts as hunks, and several versions of a text merged into one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import pairwise

from composer_jax.tasks.patches.patch import Hunk

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


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
