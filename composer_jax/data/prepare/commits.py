"""Commits as text: the message, then the changes as a unified diff."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

_SECTION = re.compile(rb"^diff --git ", re.MULTILINE)
_INDEX_LINE = re.compile(rb"^index [0-9a-f]+\.\.[0-9a-f]+.*\n", re.MULTILINE)  # names content that nobody can see


def commit_text(message: bytes, diff: bytes, is_trained: Callable[[str], bool]) -> bytes:
    """Returns the message, an empty line and the diff; b"" if no file of the diff is trained on.

    Args:
      diff: the output of git with the prefixes a/ and b/, and without renames.
      is_trained: whether a path may be trained on; changes of other files are left out, as are binary ones.
    """
    starts = [match.start() for match in _SECTION.finditer(diff)]
    sections = [diff[start:end] for start, end in zip(starts, [*starts[1:], len(diff)], strict=True)]
    kept = [_INDEX_LINE.sub(b"", section, count=1) for section in sections if _is_kept(section, is_trained)]
    return message + b"\n\n" + b"".join(kept) if kept else b""


def _is_kept(section: bytes, is_trained: Callable[[str], bool]) -> bool:
    path = _path(section)
    return path is not None and b"\n@@ " in section and is_trained(path)


def _path(section: bytes) -> str | None:
    """The path in "diff --git a/PATH b/PATH"; None for a path that git quotes."""
    names = section.partition(b"\n")[0].removeprefix(b"diff --git ")
    first, second = names[: len(names) // 2], names[len(names) // 2 + 1 :]
    return os.fsdecode(first[2:]) if first[:2] == b"a/" and second == b"b/" + first[2:] else None
