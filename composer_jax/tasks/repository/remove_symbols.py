"""Removal of definitions and modules from a repository, with their imports, re-exports and `__all__` entries.

`delete_file` makes a candidate of it; delete_feature.py makes those that delete definitions.
"""

import ast
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from composer_jax.tasks.repository.candidate import Candidate, make_candidate
from composer_jax.tasks.repository.imports import Import, Module, Repository, bound_names
from composer_jax.tasks.repository.layout import remove_elements, remove_statements
from composer_jax.tasks.repository.source import Edit, apply_edits

Binding = tuple[str, str]
"""A path, and a name that the module of this path binds."""
_STARTED_BY_NAME = ("__init__.py", "__main__.py", "conftest.py", "setup.py", "noxfile.py")


@dataclass
class SymbolRemoval:
    """The names that must go with removed definitions and modules.

    names: name in a module -> the removed definition (or module) it comes from.
    aliases: path -> the parts of import statements that go. A star import that reads a name stays.
    """

    repository: Repository
    names: dict[Binding, Binding]
    modules: frozenset[str] = frozenset()
    aliases: dict[str, list[ast.alias]] = field(default_factory=dict)

    def __post_init__(self):
        """Follows imports of imports until no more names are reached."""
        before = -1
        while before != (before := len(self.names) + sum(map(len, self.aliases.values()))):
            for module in self.repository.code:
                if module.path not in self.modules:
                    self._follow(module)

    def _follow(self, module: Module) -> None:
        removed_aliases = self.aliases.setdefault(module.path, [])
        for node, _, early in module.imports:
            for alias in node.names:
                origin = self._origin(module, node, alias)
                if origin is not None and alias not in removed_aliases:
                    removed_aliases.append(alias)
                    if early and alias.name != "*":
                        bound = alias.asname or alias.name.split(".")[0]
                        self.names.setdefault((module.path, bound), origin)
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                self._follow_star(module, node)

    def _origin(self, module: Module, node: Import, alias: ast.alias) -> Binding | None:
        """The removed definition or module behind an alias; None where the alias may stay."""
        if isinstance(node, ast.Import):
            path = self.repository.path_of(alias.name)
            return (path, "") if path in self.modules else None
        target = self.repository.target(module, node)
        path = self.repository.path_of(target)
        inner = self.repository.path_of(f"{target}.{alias.name}")
        for missing in (path, inner):
            if missing in self.modules:
                return missing, ""
        return self.names.get((path, alias.name)) if path else None

    def _follow_star(self, module: Module, node: ast.ImportFrom) -> None:
        path = self.repository.path_of(self.repository.target(module, node))
        own = {name for statement in module.source.tree.body for name in bound_names(statement)}
        if path in self.modules:
            body = self.repository.modules[path].source.tree.body
            origins = {name: (path, "") for statement in body for name in bound_names(statement)}
        else:
            origins = {name: origin for (place, name), origin in self.names.items() if place == path}
        for name, origin in origins.items():
            if name not in own:
                self.names.setdefault((module.path, name), origin)

    def names_in(self, path: str) -> dict[str, Binding]:
        """The removed names of a module, each with its origin."""
        return {name: origin for (place, name), origin in self.names.items() if place == path}

    def needed(self, removed: Mapping[str, Collection[ast.stmt]], strict: bool = False) -> set[Binding]:
        """The origins that the remaining code needs while it is imported; strict: needs at any time."""
        needed = set()
        anywhere = {name: origin for (_, name), origin in self.names.items()}
        anywhere |= {self.repository.dotted(path).split(".")[-1]: (path, "") for path in self.modules}
        for module in self.repository.code:
            if module.path in self.modules:
                continue
            names = self.names_in(module.path)
            imported = {name for node, _, _ in module.imports for name in bound_names(node)}
            inside = [module.source.span(node) for node in removed.get(module.path, ())]
            for node in ast.walk(module.source.tree) if strict else module.early_nodes:
                origin = None
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                    origin = names.get(node.id)
                elif isinstance(node, ast.Attribute) and _is_of_import(node, imported):
                    # `module.name` counts by its name alone, whichever module it is.
                    origin = anywhere.get(node.attr)
                if origin is not None:
                    start = module.source.span(node)[0]
                    if not any(first <= start < last for first, last in inside):
                        needed.add(origin)
        return needed

    def files(self, removed: Mapping[str, Collection[ast.stmt]]) -> dict[str, str | None]:
        """The new texts of the changed files: without the definitions `removed`, their aliases and exports."""
        files: dict[str, str | None] = {path: None for path in sorted(self.modules)}
        for module in self.repository.code:
            if module.path not in self.modules:
                edits = self._edits(module, removed.get(module.path, ()))
                if edits:
                    files[module.path] = apply_edits(module.source.text, edits)
        return files

    def _edits(self, module: Module, removed: Collection[ast.stmt]) -> list[Edit]:
        source, names, aliases = module.source, self.names_in(module.path), self.aliases.get(module.path, [])
        removed_statements: list[ast.stmt] = list(removed)
        edits: list[Edit] = []
        for node, _, _ in module.imports:
            parts = [alias for alias in node.names if any(alias is other for other in aliases)]
            if len(parts) == len(node.names):
                removed_statements.append(node)
            elif parts:
                edits += remove_elements(source, node.names, parts)
        for statement in exports(module):
            if _is_single_export(statement, names):
                removed_statements.append(statement)
            else:
                edits += _without_exports(module, statement, names)
        for holder, block, _ in module.blocks:
            dropped = [node for node in block if any(node is other for other in removed_statements)]
            if dropped:
                edits += remove_statements(source, block, dropped, may_be_empty=isinstance(holder, ast.Module))
        return _outermost(edits)


def _is_of_import(node: ast.Attribute, imported: Collection[str]) -> bool:
    """Whether a node is an attribute, direct or nested, of an imported name."""
    root: ast.expr = node
    while isinstance(root, ast.Attribute):
        root = root.value
    return isinstance(root, ast.Name) and root.id in imported


def _outermost(edits: Iterable[Edit]) -> list[Edit]:
    """The edits outside all others: a removed function includes the imports inside it."""
    kept: list[Edit] = []
    for edit in sorted(edits, key=lambda edit: (edit.start, -edit.end)):
        if not kept or edit.start >= kept[-1].end:
            kept.append(edit)
    return kept


def exports(module: Module) -> list[ast.stmt]:
    """The statements that set or extend `__all__` while the module is imported."""
    statements = []
    for _, block, early in module.blocks:
        for node in block if early else ():
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            call = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
            if isinstance(call, ast.Attribute):
                targets = [call.value]
            if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                statements.append(node)
    return statements


def exported_names(module: Module) -> set[str]:
    """The names in `__all__`."""
    parts = [part for statement in exports(module) for part in ast.walk(statement)]
    return {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def _is_single_export(statement: ast.stmt, names: Collection[str]) -> bool:
    """Whether a statement is `__all__.append("name")` of one of the names."""
    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
        return False
    arguments = statement.value.args
    return len(arguments) == 1 and isinstance(arguments[0], ast.Constant) and arguments[0].value in names


def _without_exports(module: Module, statement: ast.stmt, names: Collection[str]) -> list[Edit]:
    edits = []
    for node in ast.walk(statement):
        if not isinstance(node, ast.List | ast.Tuple):
            continue
        removed = [part for part in node.elts if isinstance(part, ast.Constant) and part.value in names]
        if not removed:
            continue
        left = len(node.elts) - len(removed)
        if isinstance(node, ast.Tuple) and left < 2:
            # A tuple of one needs its comma, one of none its parentheses.
            kept = next((module.source.segment(part) for part in node.elts if part not in removed), None)
            edits.append(Edit(*module.source.span(node), f"({kept},)" if kept else "()"))
        else:
            edits += remove_elements(module.source, node.elts, removed)
    return edits


def delete_file(repository: Repository, module: Module) -> Candidate | None:
    """The candidate without `module` and without the imports that only re-export its names.

    None for tests, for files that are started by their name, and where another module uses a name of this one,
    spells this module in a string, or imports it inside a function or as `import a.b`.
    """
    if module.is_test or PurePosixPath(module.path).name in _STARTED_BY_NAME:
        return None
    removal = SymbolRemoval(repository, {}, frozenset({module.path}))
    for other in repository.code:
        if other is not module and _depends(repository, other, removal, repository.dotted(module.path)):
            return None
    if removal.needed({}, strict=True):
        return None
    files = removal.files({})
    for path, text in files.items():
        if text is not None and not text.strip() and PurePosixPath(path).name != "__init__.py":
            return None  # a module that only re-exported the names
    names = tuple(entity.id for entity in module.entities)
    note = f"{module.path} was deleted; other files that passed its names on: {len(files) - 1}"
    return make_candidate("delete_file", repository.sources, files, names, note)


def _depends(repository: Repository, other: Module, removal: SymbolRemoval, dotted: str) -> bool:
    removed_aliases = removal.aliases.get(other.path, [])
    for node, _, early in other.imports:
        for alias in node.names:
            if any(alias is part for part in removed_aliases):
                dotted_import = isinstance(node, ast.Import) and "." in alias.name and not alias.asname
                if not early or dotted_import:
                    return True
    return any(isinstance(node, ast.Constant) and node.value == dotted for node in ast.walk(other.source.tree))
