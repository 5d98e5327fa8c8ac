"""What a session added to and deleted from a file, and how much of it is still so in a later text of the file.

Lines without a letter or digit (blank ones, lone brackets) count nowhere, nor does a change of whitespace, quotes,
commas, semicolons or parentheses alone: see token_alignment.py.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import re
from collections.abc import Sequence
from typing import Literal

from composer_jax.realtime.track.token_alignment import (
    ABSENT,
    TokenizedText,
    align,
    align_between,
    find_moved,
    free_tokens,
)

Author = Literal["session", "other", "unclear", "nobody"]
"""Who changed the files between two snapshots: the session, another agent's session, several of them (the session
among them), or no agent."""

MAX_BYTES = 1 << 20
"""Size of the largest file that is measured."""
MAX_ADDED_LINES = 1000
"""Lines added to one file above which the file is taken to be generated."""
_GENERATED = re.compile(
    r"(^|/)(node_modules|vendor|third_party|dist|__pycache__|\.venv|venv|site-packages|\.pytest_cache|\.mypy_cache"
    r"|\.ruff_cache|__snapshots__)/"
    r"|(^|/)(package-lock\.json|npm-shrinkwrap\.json|pnpm-lock\.yaml|go\.sum|bun\.lockb?|[^/]+\.lock)$"
    r"|\.min\.(js|css)$|\.(map|snap)$|\.pb\.(go|cc|h)$|_pb2(_grpc)?\.pyi?$|\.(g|freezed)\.dart$|(^|[./_-])generated\."
)
_GENERATED_MARK = re.compile(r"@generated\b|\bcode generated\b.*\bdo not edit\b", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class FileDiff:
    """A session's changes of one file. Lines are indices into TokenizedText.lines."""

    path: str
    """After the session."""
    before: str
    """The text before the session; empty for a new file."""
    after: str
    """The text after the session; empty for a deleted file."""
    added: tuple[int, ...]
    """Lines of `after` that the session added."""
    deleted: tuple[int, ...]
    """Lines of `before` that the session deleted."""
    foreign: tuple[int, ...] = ()
    """Lines of `after` that another agent, or nobody knows which, added."""
    unclear: int = 0
    """Lines added or deleted while the session and another one were at work, by either."""


@dataclasses.dataclass(frozen=True)
class FileSurvival:
    """Which lines of a FileDiff are as the session left them."""

    added_kept: tuple[bool, ...]
    """For each of `FileDiff.added`, whether it is still there."""
    deleted_kept: tuple[bool, ...]
    """For each of `FileDiff.deleted`, whether it is still absent."""
    others_kept: tuple[bool, ...]
    """For each line of `FileDiff.after` that no agent added, whether it is still there."""


def decode(content: bytes) -> str | None:
    """Returns the text of a file, or None for a binary one. Bytes that are not UTF-8 are kept as surrogates."""
    return None if b"\0" in content else content.decode("utf-8", errors="surrogateescape")


def reason_to_leave_out(path: str, contents: Sequence[bytes]) -> str | None:
    """Returns why a file is not measured: it is generated, binary or large; None if it is measured."""
    if _GENERATED.search(path):
        return "generated, by its name"
    if any(len(content) > MAX_BYTES for content in contents):
        return f"larger than {MAX_BYTES >> 20} MiB"
    if any(decode(content) is None for content in contents):
        return "binary"
    if any(_GENERATED_MARK.search("\n".join(str(decode(content)).split("\n")[:5])) for content in contents):
        return "generated, by the mark in its first lines"
    return None


def diff_file(path: str, versions: Sequence[str], authors: Sequence[Author]) -> FileDiff:
    """Returns what the session changed.

    versions: the text before the session, at each snapshot, and after the session.
    authors: for each version but the first, who made it from the one before.
    """
    texts = [TokenizedText(text) for text in versions]
    before, after = texts[0], texts[-1]
    added, deleted, foreign, unclear = [], [], [], 0
    covers = [_covered_lines(text, after) for text in texts[:-1]]
    for line in range(len(after.lines)):
        absent = [index for index, covered in enumerate(covers) if not covered[line]]
        author = authors[absent[-1]] if absent and after.has_word[line] else "nobody"
        if author == "session":
            added.append(line)
        elif author != "nobody":
            foreign.append(line)
            unclear += author == "unclear"
    present = [[0] * len(before.lines), *(align(before, text) for text in texts[1:])]
    for line in range(len(before.lines)):
        if present[-1][line] == ABSENT and before.has_word[line]:
            author = authors[max(index for index, starts in enumerate(present) if starts[line] != ABSENT)]
            unclear += author == "unclear"
            if author == "session":
                deleted.append(line)
    return FileDiff(path, versions[0], versions[-1], tuple(added), tuple(deleted), tuple(foreign), unclear)


def measure(diff: FileDiff, later: str) -> FileSurvival:
    """Returns what of the session's changes is in a later text of the file; "" for a file that was deleted."""
    before, after, text = TokenizedText(diff.before), TokenizedText(diff.after), TokenizedText(later)
    in_order = align(after, text)
    deleted_keys = {before.keys[line] for line in diff.deleted}
    # A line that the session itself moved is still there only where the session put it.
    own_moves = {line for line in diff.added if after.keys[line] in deleted_keys}
    movable = set(range(len(after.lines))) - own_moves
    starts = find_moved(after, text, in_order, free_tokens(after, text, in_order), movable)
    is_free = free_tokens(after, text, starts)
    restored = align_between(before, text, _compose(before, after, in_order), is_free, diff.deleted)
    is_free = [one and other for one, other in zip(is_free, free_tokens(before, text, restored), strict=True)]
    restored = find_moved(before, text, restored, is_free, set(diff.deleted))
    authored = {*diff.added, *diff.foreign}
    others = [line for line, has_word in enumerate(after.has_word) if has_word and line not in authored]
    return FileSurvival(
        added_kept=tuple(starts[line] != ABSENT for line in diff.added),
        deleted_kept=tuple(restored[line] == ABSENT for line in diff.deleted),
        others_kept=tuple(starts[line] != ABSENT for line in others),
    )


def hunk_hashes(diff: FileDiff, salt: str) -> list[str]:
    """Returns a hash of each hunk of the session's changes, in order of the file.

    salt: secret, without which short hunks could be guessed from their hashes.
    """
    before, after = TokenizedText(diff.before), TokenizedText(diff.after)
    starts = align(before, after)
    common = [line for line, start in enumerate(starts) if start != ABSENT]
    common_starts = [starts[line] for line in common]
    hunks: dict[int, list[str]] = {}
    for sign, text, lines in (("-", before, diff.deleted), ("+", after, diff.added)):
        for line in lines:
            where = bisect.bisect(common, line) if sign == "-" else bisect.bisect(common_starts, text.lines[line][0])
            hunks.setdefault(where, []).append(f"{sign} {' '.join(text.keys[line])}")
    return [
        hashlib.sha256("\n".join((salt, diff.path, str(where), *hunk)).encode(errors="surrogateescape")).hexdigest()
        for where, hunk in sorted(hunks.items())
    ]


def _covered_lines(old: TokenizedText, new: TokenizedText) -> list[bool]:
    """For each line of `new`, whether all of its tokens are aligned with lines of `old`."""
    is_free = free_tokens(old, new, align(old, new))
    return [not any(is_free[begin:end]) for begin, end in new.lines]


def _compose(before: TokenizedText, after: TokenizedText, starts: Sequence[int]) -> list[int]:
    """Where each line of `before` begins in a text, in which the lines of `after` begin at `starts`; or ABSENT."""
    where = [ABSENT] * len(after.tokens)
    for (begin, end), start in zip(after.lines, starts, strict=True):
        if start != ABSENT:
            where[begin:end] = range(start, start + end - begin)
    composed = []
    for start, key in zip(align(before, after), before.keys, strict=True):
        places = where[start : start + len(key)] if start != ABSENT else [ABSENT]
        is_there = ABSENT not in places and places == list(range(places[0], places[0] + len(places)))
        composed.append(places[0] if is_there else ABSENT)
    return composed
