"""Candidates that delete a feature: definitions that a set of tests shares and few others reach, with their helpers.

The idea is Composer 2.5's feature deletion: the code stays usable and a testable part of it is gone.
"""

import ast
import random
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from composer_jax.tasks.repository.candidate import Candidate, make_candidate
from composer_jax.tasks.repository.entities import Definition, Entity, outer_ids, referenced_name
from composer_jax.tasks.repository.imports import Module, Repository, bound_names
from composer_jax.tasks.repository.remove_symbols import Binding, SymbolRemoval, exported_names
from composer_jax.tasks.repository.source import parse

MAX_DEFINITIONS = 12
"""Most functions, methods and classes of a feature, helpers not counted."""
MAX_TESTS_SHARE = 0.5
"""Largest share of all tests that a feature's tests may be; code that more tests reach is the core."""
MAX_OTHER_TESTS = 0.25
"""Most tests outside the set that may reach a definition, as a fraction of the set's size."""

_MAKERS = ("__init__", "__new__", "__post_init__")
_WORD = re.compile(r"[^\W\d]\w*")
_LONGEST_CODE = 60


@dataclass(frozen=True, eq=False)
class Mention:
    """An occurrence of an identifier. owner: the name before the dot of an attribute, where recorded."""

    path: str
    start: int
    end: int
    owner: str
    node: ast.AST

    @property
    def place(self) -> tuple[str, int, int]:
        return self.path, self.start, self.end


@dataclass(frozen=True, eq=False)
class DefinitionGroup:
    """All definitions of one name (a property with its setter) and the tests that reach them."""

    module: Module
    entities: tuple[Entity, ...]
    tests: frozenset[str]

    @property
    def id(self) -> str:
        return self.entities[0].id

    @property
    def name(self) -> str:
        """The name without the class around it."""
        return self.entities[0].node.name

    @property
    def binding(self) -> Binding | None:
        """The path and name that other modules can import; None for a method."""
        return (self.module.path, self.name) if self.name == self.entities[0].name else None

    @cached_property
    def references(self) -> frozenset[str]:
        return frozenset(chain.from_iterable(entity.references for entity in self.entities))


def tests_by_entity(coverage: Mapping[str, Collection[str]]) -> dict[str, frozenset[str]]:
    """The coverage map inverted: entity id -> tests. A class is reached through its methods."""
    tests_of: dict[str, set[str]] = defaultdict(set)
    for test, ids in coverage.items():
        for entity in ids:
            for name in (entity, *outer_ids(entity)):
                tests_of[name].add(test)
    return {entity: frozenset(tests) for entity, tests in tests_of.items()}


class FeatureFinder:
    """Finds the features that can be deleted from a repository, given which test reaches which entity."""

    def __init__(self, repository: Repository, coverage: Mapping[str, Collection[str]]):
        self.repository = repository
        self.all_tests = frozenset(coverage)
        reached = tests_by_entity(coverage)
        self.units: dict[str, DefinitionGroup] = {}
        for module in repository.code:
            groups: dict[str, list[Entity]] = defaultdict(list)
            for entity in module.entities:
                if not entity.is_nested and not entity.is_test:
                    groups[entity.id].append(entity)
            for name, entities in groups.items():
                self.units[name] = DefinitionGroup(module, tuple(entities), reached.get(name, frozenset()))
        self._import_time = self._ids_run_by_import()
        self._needed_early = frozenset(unit.id for unit in self.units.values() if self._is_needed_early(unit))

    def candidates(self, rng: random.Random) -> Iterator[Candidate]:
        """One candidate per set of tests that has a feature of its own, in an order drawn from `rng`."""
        most = len(self.all_tests) * MAX_TESTS_SHARE
        sets = {unit.tests for unit in self.units.values() if 0 < len(unit.tests) <= most}
        order = sorted(sets, key=sorted)
        rng.shuffle(order)
        seen: set[tuple[str, ...]] = set()
        for tests in order:
            deletion = self._delete(self._feature(tests), tests)
            if deletion is not None and deletion.entities not in seen:
                seen.add(deletion.entities)
                yield deletion

    def _feature(self, tests: frozenset[str]) -> list[DefinitionGroup]:
        """The units that these tests share and few others reach; methods of a chosen class are left to it."""
        most_others = len(tests) * MAX_OTHER_TESTS
        chosen = {
            name: unit
            for name, unit in self.units.items()
            if unit.tests & tests and len(unit.tests - tests) <= most_others and name not in self._needed_early
        }
        return [unit for name, unit in chosen.items() if chosen.keys().isdisjoint(outer_ids(name))]

    def _is_needed_early(self, unit: DefinitionGroup) -> bool:
        """Whether importing the package runs the unit, or another statement of its module binds the same name."""
        if unit.id in self._import_time:
            return True
        if unit.binding is None:
            spans = _spans(self.repository, _nodes([unit]))
            owner = unit.entities[0].name.split(".")[-2]
            return any(
                place.owner == owner or (not place.owner and place.path == unit.module.path)
                for place in self._early_names.get(unit.name, ())
                if not _covers(spans, [place.place])
            )
        body = unit.module.source.tree.body
        return any(unit.name in bound_names(node) for node in body if not isinstance(node, Definition))

    def _delete(self, units: list[DefinitionGroup], tests: frozenset[str]) -> Candidate | None:
        while 0 < len(units) <= MAX_DEFINITIONS:
            removal = SymbolRemoval(self.repository, {unit.binding: unit.binding for unit in units if unit.binding})
            needed = removal.needed(_nodes(units))
            if not needed:
                break
            units = [unit for unit in units if unit.binding not in needed]
        else:
            return None
        helpers, removed = self._dead_after(units)
        every = [*units, *helpers]
        removal = SymbolRemoval(self.repository, {unit.binding: unit.binding for unit in every if unit.binding})
        for path, aliases in self._unused_imports(removed).items():
            removal.aliases.setdefault(path, []).extend(aliases)
        files = removal.files(removed)
        for path, text in files.items():
            try:
                parse(path, text or "")
            except (SyntaxError, ValueError):
                return None  # such as a `nonlocal` or a star import of a removed name
        names = tuple(unit.id for unit in every)
        note = f"removed, reached by {len(tests)} of {len(self.all_tests)} tests: {', '.join(names)}"
        return make_candidate("delete_feature", self.repository.sources, files, names, note)

    def _dead_after(self, units: list[DefinitionGroup]) -> tuple[list[DefinitionGroup], dict[str, list[ast.stmt]]]:
        """(helpers that only the removed code mentions, path -> all statements to remove, constants included)."""
        helpers: list[DefinitionGroup] = []
        removed = _nodes(units)
        pending = True
        while pending:
            spans = _spans(self.repository, removed)
            mentioned = {name for unit in [*units, *helpers] for name in unit.references}
            mentioned |= {n for nodes in removed.values() for node in nodes for n in _mentions_in(node)}
            pending = False
            for unit in self.units.values():
                if unit.name in mentioned and unit not in units and unit not in helpers and self._is_helper(unit):
                    own = [(unit.module.path, *entity.span) for entity in unit.entities]
                    if not self._is_mentioned(unit.name, [*spans, *own]) and not _covers(spans, own):
                        helpers.append(unit)
                        pending = True
            for module in self.repository.code:
                for name, statement in _constants(module, mentioned):
                    if statement in removed.get(module.path, []):
                        continue
                    own = [(module.path, *module.source.span(statement))]
                    if not self._is_mentioned(name, [*spans, *own]):
                        removed.setdefault(module.path, []).append(statement)
                        pending = True
            for path, nodes in _nodes(helpers).items():
                known = removed.setdefault(path, [])
                known += [node for node in nodes if not any(node is other for other in known)]
        return helpers, removed

    def _is_helper(self, unit: DefinitionGroup) -> bool:
        """Whether only this repository can use the unit: a private method, or a name that is not exported."""
        if unit.binding is None:
            return unit.name.startswith("_") and not unit.name.startswith("__")
        exported = unit.name in exported_names(unit.module)
        return not exported and unit.id not in self._needed_early

    def _unused_imports(self, removed: Mapping[str, list[ast.stmt]]) -> dict[str, list[ast.alias]]:
        """The imports that only the removed statements use and no other module imports again."""
        unused: dict[str, list[ast.alias]] = {}
        for path, nodes in removed.items():
            module = self.repository.modules[path]
            if path.endswith("__init__.py"):
                continue
            spans = _spans(self.repository, {path: nodes})
            used = {name for node in nodes for name in _mentions_in(node)}
            for statement, _, _ in module.imports:
                if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
                    continue
                for alias in statement.names:
                    name = alias.asname or alias.name
                    left = [
                        other
                        for other in self._mentions.get(name, ())
                        if other.node is not alias
                        and (other.path == path or isinstance(other.node, ast.alias))
                        and not _covers(spans, [other.place])
                    ]
                    if name in used and not left:
                        unused.setdefault(path, []).append(alias)
        return unused

    @cached_property
    def _mentions(self) -> dict[str, list[Mention]]:
        """identifier -> its occurrences: read, attribute, imported or spelled in a string; tests included."""
        mentions: dict[str, list[Mention]] = defaultdict(list)
        for module in self.repository.modules.values():
            for node in ast.walk(module.source.tree):
                for name in _mentioned_by(node):
                    mentions[name].append(Mention(module.path, *module.source.span(node), "", node))
        return mentions

    def _is_mentioned(self, name: str, spans: list[tuple[str, int, int]]) -> bool:
        """Whether a name is mentioned outside the spans."""
        return any(not _covers(spans, [mention.place]) for mention in self._mentions.get(name, ()))

    def _ids_run_by_import(self) -> frozenset[str]:
        """Ids that importing the code may run. Calls are followed by name alone, so there are rather too many."""
        by_name: dict[str, list[DefinitionGroup]] = defaultdict(list)
        for unit in self.units.values():
            by_name[unit.name].append(unit)
        pending: set[str] = set()
        for module in self.repository.code:
            for node in module.early_nodes:
                called = [node.func] if isinstance(node, ast.Call) else getattr(node, "decorator_list", ())
                pending |= {name for part in called if (name := referenced_name(part))}
        seen: set[str] = set()
        run: set[str] = set()
        while pending:
            name = pending.pop()
            seen.add(name)
            for unit in by_name[name]:
                run.add(unit.id)
                # A class that lacks one of its abstract methods cannot be instantiated.
                run |= {f"{unit.id}.{abstract}" for abstract in self._abstract}
                is_class = unit.entities[0].kind == "class"
                runs = [self.units.get(f"{unit.id}.{init}") for init in _MAKERS] if is_class else [unit]
                for started in filter(None, runs):
                    run.add(started.id)
                    pending |= started.references - seen
        return frozenset(run)

    @cached_property
    def _abstract(self) -> frozenset[str]:
        return frozenset(
            unit.name
            for unit in self.units.values()
            for decorator in unit.entities[0].node.decorator_list
            if (referenced_name(decorator) or "").startswith("abstract")
        )

    @cached_property
    def _early_names(self) -> dict[str, list[Mention]]:
        """identifier -> its occurrences as a name, or as an attribute of a name, while the code is imported."""
        mentions: dict[str, list[Mention]] = defaultdict(list)
        for module in self.repository.code:
            for node in module.early_nodes:
                owner = ""
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    owner = node.value.id
                elif not isinstance(node, ast.Name):
                    continue
                if name := referenced_name(node):
                    mentions[name].append(Mention(module.path, *module.source.span(node), owner, node))
        return mentions


def _mentioned_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.alias):
        return [node.name.split(".")[0]]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        # Annotations in quotes and names for getattr are short; longer strings are prose.
        return _WORD.findall(node.value) if len(node.value) <= _LONGEST_CODE else []
    return [name] if (name := referenced_name(node)) else []


def _mentions_in(statement: ast.stmt) -> set[str]:
    return {name for node in ast.walk(statement) if (name := referenced_name(node))}


def _constants(module: Module, names: Collection[str]) -> list[tuple[str, ast.Assign]]:
    """(name, assignment) for assignments of one of these names alone at the top of a module that does not export it."""
    exported = exported_names(module)
    return [
        (node.targets[0].id, node)
        for node in module.source.tree.body
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
        if node.targets[0].id in names and node.targets[0].id not in exported
        if not node.targets[0].id.startswith("__")
    ]


def _nodes(units: Collection[DefinitionGroup]) -> dict[str, list[ast.stmt]]:
    nodes: dict[str, list[ast.stmt]] = {}
    for unit in units:
        nodes.setdefault(unit.module.path, []).extend(entity.node for entity in unit.entities)
    return nodes


def _spans(repository: Repository, removed: Mapping[str, Collection[ast.stmt]]) -> list[tuple[str, int, int]]:
    return [(path, *repository.modules[path].source.span(node)) for path, nodes in removed.items() for node in nodes]


def _covers(spans: Collection[tuple[str, int, int]], places: Collection[tuple[str, int, int]]) -> bool:
    """Whether every place is inside one of the spans."""
    return all(
        any(path == where and first <= start and end <= last for where, first, last in spans)
        for path, start, end in places
    )
