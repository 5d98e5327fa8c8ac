"""Candidates from a repository's text and coverage: many kinds and places, the same ones in every run."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from composer_jax.errors import UserError
from composer_jax.seeds import seeded_random
from composer_jax.tasks.repository.candidate import Candidate
from composer_jax.tasks.repository.delete_feature import FeatureFinder, tests_by_entity
from composer_jax.tasks.repository.imports import Repository
from composer_jax.tasks.repository.mutate import MUTATIONS, applies_to, mutate, stub
from composer_jax.tasks.repository.remove_symbols import delete_file

KINDS = (*(f"mutate:{kind}" for kind in MUTATIONS), "stub", "delete_feature", "delete_file")
"""The kinds that need text and coverage alone; combine needs accepted candidates, revert_commit a history."""
MAX_PER_KIND = 2
"""Most mutations of one kind in one entity."""
MAX_PER_ENTITY = 8
"""Most mutations of one entity, summed over the kinds."""


def propose(
    sources: Mapping[str, str],
    tests: Collection[str],
    coverage: Mapping[str, Collection[str]],
    seed: int,
    kinds: Sequence[str] | None = None,
) -> Iterator[Candidate]:
    """Candidates of the kinds in turn, without repeats, until all are exhausted; a pure function of its arguments.

    sources: path -> text of every Python file, tests included. tests: paths of test files whose names do not show it.
    coverage: test id -> ids ("path::Qual.name") that the test runs; only these are changed.
    kinds: of KINDS, all by default. Raises UserError for a kind that is not in KINDS.
    """
    for kind in kinds or ():
        if kind not in KINDS:
            raise UserError(f"{kind!r} is not a kind of candidate; use some of {', '.join(KINDS)}")
    return _round_robin(Proposer(sources, tests, coverage, seed), KINDS if kinds is None else tuple(kinds))


def _round_robin(proposer: Proposer, kinds: Sequence[str]) -> Iterator[Candidate]:
    streams = [(kind, proposer.stream(kind)) for kind in kinds]
    seen: set[str] = set()
    changed: Counter[str] = Counter()
    while streams:
        alive = []
        for kind, stream in streams:
            for proposal in stream:
                text = json.dumps(sorted(proposal.files.items()))
                name = proposal.entities[0] if kind.startswith("mutate:") else ""
                if text not in seen and (not name or changed[name] < MAX_PER_ENTITY):
                    seen.add(text)
                    changed[name] += 1
                    alive.append((kind, stream))
                    yield proposal
                    break
        streams = alive


class Proposer:
    """The streams of candidates of a repository, one per kind."""

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
        """The candidates of one kind; they do not depend on the draws of other kinds."""
        if kind == "delete_feature":
            return FeatureFinder(self.repository, self.coverage).candidates(seeded_random(*self.key, kind))
        if kind == "delete_file":
            return self._file_deletions(kind)
        return self._entity_changes(kind)

    def _entity_changes(self, kind: str) -> Iterator[Candidate]:
        entities = [
            entity
            for module in self.repository.code
            for entity in module.entities
            if entity.id in self.covered and not entity.is_test
        ]
        seeded_random(*self.key, kind).shuffle(entities)
        for entity in entities:
            if kind == "stub":
                stubbed = stub(entity)
                if stubbed is not None:
                    yield stubbed
            elif applies_to(kind.removeprefix("mutate:"), entity):
                rng = seeded_random(*self.key, kind, entity.id, entity.node.lineno)
                left = MAX_PER_KIND
                for mutated in mutate(kind.removeprefix("mutate:"), entity, rng):
                    if mutated.entities[0] in self.covered:
                        left -= 1
                        yield mutated
                    if not left:
                        break

    def _file_deletions(self, kind: str) -> Iterator[Candidate]:
        modules = [m for m in self.repository.code if any(entity.id in self.covered for entity in m.entities)]
        seeded_random(*self.key, kind).shuffle(modules)
        for module in modules:
            deletion = delete_file(self.repository, module)
            if deletion is not None:
                yield deletion
