"""One way to break a repository, before any test has run: the changed files and the removed lines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from composer_jax.tasks.patches import diff_lines, split_lines


@dataclass(frozen=True)
class Candidate:
    """A breakage of a repository. Compared by value; `id` is the same on every machine.

    kind: "mutate:compare_flip", "stub", "delete_feature", "delete_file", "combine", "revert_commit".
    files: relative posix path -> the new text, of every file that changes; None where it is deleted.
    entities: "path::Qual.name" of the changed definitions. removed: the old lines that are gone, one text per block of
    consecutive lines, in the order of paths and lines. note: one line for people.
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


def make_candidate(
    kind: str, sources: Mapping[str, str], files: Mapping[str, str | None], entities: Sequence[str], note: str
) -> Candidate:
    """The candidate that replaces `files` in `sources`; `removed` comes from the difference."""
    removed: list[str] = []
    for path in sorted(files):
        hunks = diff_lines(split_lines(sources.get(path, "")), split_lines(files[path] or ""))
        removed += ["".join(hunk.old) for hunk in hunks if hunk.old]
    return Candidate(kind, dict(sorted(files.items())), tuple(entities), tuple(removed), note)
