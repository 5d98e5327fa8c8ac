"""Combinations of accepted candidates: tasks with more than one thing to repair."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from composer_jax.errors import UserError
from composer_jax.tasks.patches import merge_versions, split_lines
from composer_jax.tasks.repository.candidate import Candidate, make_candidate
from composer_jax.tasks.repository.source import parse


def combine(sources: Mapping[str, str], parts: Sequence[Candidate]) -> Candidate | None:
    """The candidate that makes the changes of all `parts`, two or more; None where two touch the same place.

    Lines are merged as in a three-way merge; a deleted file cannot be combined with changes of the file.
    Raises UserError for fewer than two.
    """
    if len(parts) < 2:
        raise UserError(f"{len(parts)} candidates cannot be combined; give two or more")
    parts = sorted(parts, key=lambda part: part.id)
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


def combinations(
    sources: Mapping[str, str], parts: Sequence[Candidate], rng: random.Random, size: int = 2
) -> Iterator[Candidate]:
    """Combinations of `size` candidates that change the same file, then of those that change the same folder.

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
            while len(group) >= size:
                combined, group = _first_fit(sources, group, size)
                if combined is not None and combined.id not in seen:
                    seen.add(combined.id)
                    yield combined


def _first_fit(
    sources: Mapping[str, str], group: Sequence[Candidate], size: int
) -> tuple[Candidate | None, list[Candidate]]:
    """The first candidate of a group combined with the next ones that fit, and the remaining candidates."""
    chosen, combined = [group[0]], None
    for part in group[1:]:
        # Two kinds about one entity are one repair, not two.
        if len(chosen) < size and not any(set(part.entities) & set(other.entities) for other in chosen):
            merged = combine(sources, [*chosen, part])
            if merged is not None:
                chosen.append(part)
                combined = merged
    left = [part for part in group if not any(part is other for other in chosen)]
    return (combined if len(chosen) == size else None), left
