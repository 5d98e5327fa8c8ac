"""Ways to break a repository, before any test has run: the changed files and the removed lines, and combinations."""

import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from composer_jax.tasks.patches import diff_lines, merge_versions, split_lines
from composer_jax.tasks.repository.source import parse


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


def combine(sources: Mapping[str, str], first: Candidate, second: Candidate) -> Candidate | None:
    """The candidate that makes the changes of both; None where they touch the same place.

    Lines are merged as in a three-way merge; a deleted file cannot be combined with changes of the file.
    """
    parts = sorted((first, second), key=lambda part: part.id)
    files: dict[str, str | None] = {}
    for path in sorted({path for part in parts for path in part.files}):
        texts = [part.files[path] for part in parts if path in part.files]
        if len(texts) == 1:
            files[path] = texts[0]
            continue
        versions = [split_lines(text) for text in texts if text is not None]
        if len(versions) < len(texts) or path not in sources:
            return None
        merged = files[path] = merge_versions(split_lines(sources[path]), versions)
        if merged is None:
            return None
        if path.endswith(".py"):
            try:
                parse(path, merged)
            except (SyntaxError, ValueError):
                return None
    names = tuple(dict.fromkeys(name for part in parts for name in part.entities))
    return make_candidate("combine", sources, files, names, "; ".join(part.note for part in parts))


def combinations(sources: Mapping[str, str], parts: Sequence[Candidate], rng: random.Random) -> Iterator[Candidate]:
    """Combinations of two candidates that change the same file, then of two that change the same folder.

    A candidate is in at most one combination of each of the two. The order is drawn from `rng`.
    """
    seen: set[str] = set()
    for place in (lambda path: path, lambda path: str(PurePosixPath(path).parent)):
        groups: dict[str, list[Candidate]] = defaultdict(list)
        for part in sorted(parts, key=lambda part: part.id):
            places = {place(path) for path in part.files}
            if len(places) == 1:
                groups[places.pop()].append(part)
        for name in sorted(groups):
            group = groups[name]
            rng.shuffle(group)
            while len(group) >= 2:
                combined, group = _first_fit(sources, group)
                if combined is not None and combined.id not in seen:
                    seen.add(combined.id)
                    yield combined


def _first_fit(sources: Mapping[str, str], group: Sequence[Candidate]) -> tuple[Candidate | None, list[Candidate]]:
    """The first candidate of a group combined with the next one that fits, and the remaining candidates."""
    first, *others = group
    for part in others:
        # Two kinds about one entity are one repair, not two.
        if set(part.entities).isdisjoint(first.entities) and (combined := combine(sources, first, part)) is not None:
            return combined, [other for other in others if other is not part]
    return None, others
