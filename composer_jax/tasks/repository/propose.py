"""Candidates from a repository's text and coverage: many kinds, many places, the same ones every time."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from composer_jax.errors import UserError
from composer_jax.seeds import seeded_random
from composer_jax.tasks.repository.candidate import Candidate
from composer_jax.tasks.repository.delete_feature import FeatureFinder, tests_by_entity
from composer_jax.tasks.repository.delete_file import delete_file
from composer_jax.tasks.repository.entities import Entity
from composer_jax.tasks.repository.imports import Repository
from composer_jax.tasks.repository.mutate import MUTATIONS, applies_to, mutate
from composer_jax.tasks.repository.stub import stub

KINDS = (*(f"mutate:{kind}" for kind in MUTATIONS), "stub", "delete_feature", "delete_file")
"""What can be proposed from text and coverage alone; combine needs judged candidates, revert_commit a history."""
MAX_PER_KIND = 2
"""Most mutations of one kind of one entity."""
MAX_PER_ENTITY = 8
"""Most mutations of one entity, all kinds together."""


def propose(
    sources: Mapping[str, str],
    tests: Collection[str],
    coverage: Mapping[str, Collection[str]],
    seed: int,
    kinds: Sequence[str] | None = None,
) -> Iterator[Candidate]:
    """Candidates of the kinds in turn, each once, until no kind has more; a pure function of its arguments.

    sources: path -> text of every Python file, tests too. tests: the paths of test files, beside those that
    their names tell. coverage: test id -> ids ("path::Qual.name") that the test runs; only these are changed.
    kinds: of KINDS, all by default. Raises UserError for a kind that is not in KINDS.
    """
    for kind in kinds or ():
        if kind not in KINDS:
            raise UserError(f"{kind!r} is no kind of candidate; use some of {', '.join(KINDS)}")
    return _round_robin(Proposer(sources, tests, coverage, seed), KINDS if kinds is None else tuple(kinds))


def _round_robin(proposer: Proposer, kinds: Sequence[str]) -> Iterator[Candidate]:
    streams = [(kind, proposer.stream(kind)) for kind in kinds]
    seen: set[str] = set()
    changed: Counter[str] = Counter()
    while streams:
        alive = []
        for kind, stream in streams:
            for found in stream:
                text = json.dumps(sorted(found.files.items()))
                name = found.entities[0] if kind.startswith("mutate:") else ""
                if text not in seen and (not name or changed[name] < MAX_PER_ENTITY):
                    seen.add(text)
                    changed[name] += 1
                    alive.append((kind, stream))
                    yield found
                    break
        streams = alive


class Proposer:
    """A repository ready to be broken: one stream of candidates per kind."""

    def __init__(
        self,
        sources: Mapping[str, str],
        tests: Collection[str],
        coverage: Mapping[str, Collection[str]],
        seed: int,
    ):
        self.repository = Repository(sources, tests)
        self.coverage = coverage
        self.covered = frozenset(tests_by_entity(coverage))
        content = hashlib.sha256(json.dumps(sorted(sources.items())).encode()).hexdigest()
        self.key = ("candidates", seed, content)

    def stream(self, kind: str) -> Iterator[Candidate]:
        """The candidates of one kind; no other kind's draws change them."""
        if kind == "delete_feature":
            return FeatureFinder(self.repository, self.coverage).candidates(seeded_random(*self.key, kind))
        if kind == "delete_file":
            return self._files(kind)
        return self._changes(kind)

    def _entities(self, kind: str) -> list[Entity]:
        found = [
            entity
            for module in self.repository.code
            for entity in module.entities
            if entity.id in self.covered and not entity.is_test
        ]
        seeded_random(*self.key, kind).shuffle(found)
        return found

    def _changes(self, kind: str) -> Iterator[Candidate]:
        for entity in self._entities(kind):
            if kind == "stub":
                found = stub(entity)
                if found is not None:
                    yield found
            elif applies_to(kind.removeprefix("mutate:"), entity):
                rng = seeded_random(*self.key, kind, entity.id, entity.node.lineno)
                left = MAX_PER_KIND
                for change in mutate(kind.removeprefix("mutate:"), entity, rng):
                    if change.entities[0] in self.covered:
                        left -= 1
                        yield change
                    if not left:
                        break

    def _files(self, kind: str) -> Iterator[Candidate]:
        modules = [m for m in self.repository.code if any(entity.id in self.covered for entity in m.entities)]
        seeded_random(*self.key, kind).shuffle(modules)
        for module in modules:
            found = delete_file(self.repository, module)
            if found is not None:
                yield found
