"""Candidates from real source: the standard library's own modules."""

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_jax.errors import UserError
from composer_jax.seeds import seeded_random
from composer_jax.tasks.repository.entities import parse_entities
from composer_jax.tasks.repository.mutate import MUTATIONS, mutate
from composer_jax.tasks.repository.propose import KINDS, MAX_PER_ENTITY, MAX_PER_KIND, propose
from composer_jax.tasks.repository.source import SourceFile

ROOT = Path(__file__).parents[3]


def every_entity(sources):
    return [entity for path, text in sources.items() for entity in parse_entities(SourceFile(path, text))]


@pytest.fixture(scope="module")
def covered(library):
    """An invented coverage: three entities per test, so that every one is reached and features exist."""
    ids = sorted({entity.id for entity in every_entity(library)})
    return {f"test_{index}": frozenset(ids[index : index + 3]) for index in range(0, len(ids), 3)}


@pytest.fixture(scope="module")
def proposals(library, covered):
    """The first proposals, many of every kind."""
    return list(islice(propose(library, [], covered, seed=0), 160))


def test_every_kind_is_proposed_in_turns(proposals):
    assert {candidate.kind for candidate in proposals} == set(KINDS)
    first = [candidate.kind for candidate in proposals[: len(KINDS) - 2]]
    assert len(set(first)) == len(first)


def test_candidates_compile_and_change_their_entities_only(proposals, library):
    table = {path: parse_entities(SourceFile(path, text)) for path, text in library.items()}
    shapes = {path: ast.dump(ast.parse(text)) for path, text in library.items()}
    dumped = Counter()
    for candidate in proposals:
        assert all(any(block in library[path] for path in candidate.files) for block in candidate.removed)
        for path, text in candidate.files.items():
            if text is not None:
                compile(text, path, "exec")
                dumped[candidate.kind] += 1
                if dumped[candidate.kind] <= 2:  # slow; that every mutation differs is tested on its own
                    assert ast.dump(ast.parse(text)) != shapes[path]
        if not candidate.kind.startswith("delete_"):
            ((path, text),) = candidate.files.items()
            owners = [entity for entity in table[path] if is_part(candidate.entities[0], entity.id)]
            assert any(is_only_changed_inside(library[path], text, lines_of(owner)) for owner in owners)


def is_part(name, owner):
    """Whether an id equals another or is a method of it: a removed method changes its class."""
    return name == owner or name.rpartition(".")[0] == owner


def lines_of(entity):
    """The span of the lines of an entity, as offsets."""
    source = entity.source
    start, end = entity.span
    return source.line_start(source.line_of(start)), source.line_start(source.line_of(end) + 1)


def is_only_changed_inside(old, new, span):
    start, end = span
    return old[:start] == new[:start] and old[end:] == new[len(new) - (len(old) - end) :]


def test_candidates_are_unique_and_limited_per_entity(proposals):
    assert len({json.dumps(sorted(candidate.files.items())) for candidate in proposals}) == len(proposals)
    mutations = [
        (candidate.entities[0], candidate.kind) for candidate in proposals if candidate.kind.startswith("mutate:")
    ]
    names = [name for name, _ in mutations]
    assert max(map(names.count, set(names))) <= MAX_PER_ENTITY
    assert max(map(mutations.count, set(mutations))) <= MAX_PER_KIND


def test_only_covered_entities_are_changed(library):
    coverage = {"t": {"heapq.py::merge", "textwrap.py::TextWrapper._split"}, "u": set(), "v": set()}
    named = [c for c in propose(library, [], coverage, 0) if c.kind.startswith(("mutate:", "stub"))]
    names = {candidate.entities[0] for candidate in named}
    # A class is covered through its methods: its defaults and bases may change, no other method.
    assert names == {"heapq.py::merge", "textwrap.py::TextWrapper._split", "textwrap.py::TextWrapper"}


def test_tests_are_never_changed(library, covered):
    proposals = islice(propose(library, ["heapq.py"], covered, 0), 60)
    assert all("heapq.py" not in candidate.files for candidate in proposals)


def test_one_kind_does_not_depend_on_the_others(library, covered):
    def ids(kinds):
        return [c.id for c in islice(propose(library, [], covered, 0, kinds), 40) if c.kind == "stub"]

    alone, together = ids(["stub"]), ids(["delete_feature", "stub"])
    assert together and alone[: len(together)] == together


def test_another_seed_gives_other_candidates(library, covered):
    first, second = ([c.id for c in islice(propose(library, [], covered, seed), 5)] for seed in (0, 1))
    assert first != second


def test_an_unknown_kind_is_refused_before_anything_is_drawn(library):
    with pytest.raises(UserError, match="'mutate:nothing' is not a kind of candidate; use some of mutate:"):
        propose(library, [], {}, 0, ["mutate:nothing"])


def test_files_that_do_not_compile_are_skipped(library, covered):
    broken = {**library, "template.py": "def {{ name }}():\n"}
    assert next(propose(broken, [], covered, 0)).kind in KINDS


CODE = """
import json, sys
from itertools import islice
from composer_jax.tasks.repository.propose import propose
sources, coverage = (dict(reversed(list(mapping.items()))) for mapping in json.load(sys.stdin))
coverage = {test: frozenset(ids) for test, ids in coverage.items()}
print(*(c.id for c in islice(propose(sources, frozenset(), coverage, 7), 60)))
"""


def test_candidates_do_not_depend_on_hash_seed_or_order(library, covered):
    given_in = json.dumps([library, {test: sorted(ids) for test, ids in covered.items()}])
    here = [c.id for c in islice(propose(library, frozenset(), covered, 7), 60)]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", CODE]
    there = subprocess.check_output(command, input=given_in, text=True, cwd=ROOT, env=environment)
    assert there.split() == here


def test_every_kind_of_mutation_applies_to_the_standard_library(library):
    table = every_entity(library)
    for kind in MUTATIONS:
        assert any(next(mutate(kind, entity, seeded_random(0)), None) for entity in table), kind


@pytest.fixture(scope="module")
def small(library):
    """Entities of two modules, with their own and with Windows line ends."""
    texts = [(path, library[path]) for path in ("textwrap.py", "heapq.py")]
    texts += [(path, text.replace("\n", "\r\n")) for path, text in texts]
    return [entity for path, text in texts for entity in parse_entities(SourceFile(path, text))]


@settings(max_examples=60)
@given(st.data())
def test_mutations_of_any_entity_keep_the_other_code(small, data):
    entity = data.draw(st.sampled_from(small))
    kind = data.draw(st.sampled_from(sorted(MUTATIONS)))
    old, path = entity.source.text, entity.source.path
    for candidate in islice(mutate(kind, entity, seeded_random(data.draw(st.integers(0, 9)))), 3):
        new = candidate.files[path]
        assert ast.dump(ast.parse(new)) != ast.dump(ast.parse(old))
        assert is_only_changed_inside(old, new, lines_of(entity))
        assert "\r" not in old or new.count("\n") == new.count("\r\n")
