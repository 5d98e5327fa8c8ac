"""Candidates: the files, rows and commits of a unit, in an order that is the same whenever the unit is read."""

import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from composer_jax.data.corpus import split_position
from composer_jax.data.prepare.config import PrepareConfig
from composer_jax.data.prepare.filters import POINTER_STARTS, reason_by_path
from composer_jax.data.prepare.git_repository import BlobReader, read_commits
from composer_jax.data.prepare.languages import DIFF, TEXT, Language, language_of
from composer_jax.data.prepare.plan import Part, WorkUnit
from composer_jax.data.row_files import RawRow, read_json_range, read_parquet_range
from composer_jax.data.tokenizer import encodable
from composer_jax.errors import UserError
from composer_jax.git import UnreadableRepository

_SECTION = re.compile(rb"^diff --git ", re.MULTILINE)
_LINK_MODE = re.compile(rb"^(?:(?:new|old|new file|deleted file) mode|index \S+) 1[26]0000$", re.MULTILINE)
_STARTS = b"|".join(map(re.escape, POINTER_STARTS))
_POINTER = re.compile(rb"-[01](,\d+)? \+[01](,\d+)? @@\n([ -]|([-\\].*\n)*[ +])(%b)" % _STARTS)
"""A hunk behind its "@@ ", of a file whose first line is, was or becomes that of a pointer."""
_INDEX_LINE = re.compile(rb"^index [0-9a-f]+\.\.[0-9a-f]+.*\n", re.MULTILINE)  # names blobs that the diff does not show


@dataclass(frozen=True)
class DocumentCandidate:
    """Something that may become a document, or a file of one."""

    ordinal: int
    """Its place in the unit."""
    part: Part
    path: str
    """Path below the repository; for a row without one and for a commit, where it is."""
    language: Language
    num_bytes: int
    heldout: bool
    reason: str | None
    """Why it is left out without being read; None if it is to be read."""
    load: Callable[[], bytes]
    """Returns the content. Raises OSError. May be called until the next candidate is asked for."""


def read_candidates(unit: WorkUnit, config: PrepareConfig) -> Iterator[DocumentCandidate]:
    """Yields the candidates of a unit. Raises UserError for a repository or file of rows that cannot be read."""
    ordinals = itertools.count()
    for part in unit.parts:
        yield from _READERS[part.kind](part, config, ordinals)


def is_heldout(part: Part, path: str, config: PrepareConfig) -> bool:
    """Whether a file of a repository is held out, which a hash of its path below the source decides."""
    return split_position(f"{part.name}/{path}") < config.heldout_fraction


def _folder(part: Part, config: PrepareConfig, ordinals: Iterator[int]) -> Iterator[DocumentCandidate]:
    for path, num_bytes in part.entries:
        yield _file(part, config, next(ordinals), path, num_bytes, partial(_read_file, part.root, path))


def _read_file(root: str, path: str) -> bytes:
    with open(f"{root}/{path}", "rb") as file:
        return file.read()


def _git(part: Part, config: PrepareConfig, ordinals: Iterator[int]) -> Iterator[DocumentCandidate]:
    with BlobReader(Path(part.root)) as reader:
        for path, num_bytes, object_id in part.entries:
            yield _file(part, config, next(ordinals), path, num_bytes, partial(reader.read, object_id))


def _file(
    part: Part, config: PrepareConfig, ordinal: int, path: str, num_bytes: int, load: Callable[[], bytes]
) -> DocumentCandidate:
    language = language_of(path)
    reason = reason_by_path(path, language, config.languages)
    if reason is None and num_bytes > config.max_file_bytes:
        reason = "too large"
    return DocumentCandidate(
        ordinal, part, path, language or TEXT, num_bytes, is_heldout(part, path, config), reason, load
    )


def _commits(part: Part, config: PrepareConfig, ordinals: Iterator[int]) -> Iterator[DocumentCandidate]:
    def is_trained(path: str) -> bool:
        return reason_by_path(path, language_of(path), config.languages) is None and not is_heldout(part, path, config)

    try:
        for commit in read_commits(Path(part.root), part.commit, part.entries[0][0], config.commit_bytes):
            text = b"" if commit.diff is None else _commit_text(commit.message, commit.diff, is_trained)
            reason = commit.reason or (None if text else "no training file")
            yield DocumentCandidate(next(ordinals), part, commit.id, DIFF, len(text), False, reason, text.__bytes__)
    except UnreadableRepository:
        yield DocumentCandidate(next(ordinals), part, part.commit, DIFF, 0, False, "incomplete history", bytes)


def _left_out(part: Part, config: PrepareConfig, ordinals: Iterator[int]) -> Iterator[DocumentCandidate]:
    for path, num_bytes, reason in part.entries:
        yield DocumentCandidate(next(ordinals), part, path, TEXT, num_bytes, False, reason, bytes)


def _commit_text(message: bytes, diff: bytes, is_trained: Callable[[str], bool]) -> bytes:
    """Returns the message, an empty line and the diff; b"" if no file of the diff is trained on.

    Links and pointers of git-lfs are not files here.

    Args:
      diff: the output of git with the prefixes a/ and b/, and without renames.
      is_trained: whether a path may be trained on; changes of other files are left out, as are binary ones.
    """
    starts = [match.start() for match in _SECTION.finditer(diff)]
    sections = [diff[start:end] for start, end in itertools.pairwise([*starts, len(diff)])]
    kept = [_INDEX_LINE.sub(b"", section, count=1) for section in sections if _is_kept(section, is_trained)]
    return message + b"\n\n" + b"".join(kept) if kept else b""


def _is_kept(section: bytes, is_trained: Callable[[str], bool]) -> bool:
    path = _changed_path(section)
    head, _, hunks = section.partition(b"\n@@ ")
    points = _LINK_MODE.search(head) or _POINTER.match(hunks)
    return path is not None and bool(hunks) and not points and is_trained(path)


def _changed_path(section: bytes) -> str | None:
    """The path in "diff --git a/PATH b/PATH"; None for a path that git quotes."""
    names = section.partition(b"\n")[0].removeprefix(b"diff --git ")
    first, second = names[: len(names) // 2], names[len(names) // 2 + 1 :]
    return os.fsdecode(first[2:]) if first[:2] == b"a/" and second == b"b/" + first[2:] else None


def _rows(part: Part, config: PrepareConfig, ordinals: Iterator[int]) -> Iterator[DocumentCandidate]:
    (first, end), path = part.entries[0], Path(part.root)
    fields = [config.text_field, *([config.path_field] if config.path_field else [])]
    try:
        rows = (
            read_json_range(path, first, end) if part.kind == "jsonl" else read_parquet_range(path, first, end, fields)
        )
        for row in rows:
            yield _row(part, config, next(ordinals), row)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); make it readable, or leave it out") from error


def _row(part: Part, config: PrepareConfig, ordinal: int, row: RawRow) -> DocumentCandidate:
    value = row.value if isinstance(row.value, dict) else {}
    text, path = value.get(config.text_field), value.get(config.path_field) if config.path_field else None
    if not isinstance(text, str) or (config.path_field and not isinstance(path, str)):
        return DocumentCandidate(ordinal, part, row.name, TEXT, row.num_bytes, False, "no text", bytes)
    data = encodable(text).encode()
    # The text decides, so that rows may change their places.
    heldout = split_position(hashlib.sha256(data).hexdigest()) < config.heldout_fraction
    language, reason = TEXT, None
    if path:
        language = language_of(path) or TEXT
        reason = reason_by_path(path, language_of(path), config.languages)
    if len(data) > config.max_file_bytes:
        reason = reason or "too large"
    return DocumentCandidate(ordinal, part, path or row.name, language, len(data), heldout, reason, data.__bytes__)


_READERS: Mapping[str, Callable[[Part, PrepareConfig, Iterator[int]], Iterator[DocumentCandidate]]] = {
    "folder": _folder,
    "git": _git,
    "commits": _commits,
    "jsonl": _rows,
    "parquet": _rows,
    "left out": _left_out,
}
