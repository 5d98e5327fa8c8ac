"""The modules of a repository, their imports of each other, and the code that runs while they are imported."""

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

from composer_jax.errors import UserError
from composer_jax.tasks.repository.entities import Entity, Function, parse_entities
from composer_jax.tasks.repository.source import SourceFile
from composer_jax.tasks.suites.protected import is_protected

Import = ast.Import | ast.ImportFrom
_NEVER_IMPORTED = re.compile(r"TYPE_CHECKING\Z|\A__name__ == ")  # conditions of code that importing does not run


@dataclass(frozen=True, eq=False)
class Module:
    """One file of the repository. is_test: whether it is test code, which no candidate changes."""

    source: SourceFile
    is_test: bool

    @property
    def path(self) -> str:
        return self.source.path

    @cached_property
    def entities(self) -> list[Entity]:
        return parse_entities(self.source)

    @cached_property
    def blocks(self) -> list[tuple[ast.AST, list[ast.stmt], bool]]:
        """(node, block, early) for every list of statements; early: whether it runs while the file is imported."""
        blocks: list[tuple[ast.AST, list[ast.stmt], bool]] = []
        stack: list[tuple[ast.AST, bool]] = [(self.source.tree, True)]
        while stack:
            node, early = stack.pop()
            early = early and not isinstance(node, Function)
            for field in ("body", "orelse", "finalbody"):
                block = getattr(node, field, None)
                if isinstance(block, list) and block:
                    blocks.append((node, block, early))
            stack += [
                (child, early)
                for child in ast.iter_child_nodes(node)
                if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case)
            ]
        return sorted(blocks, key=lambda item: self.source.span(item[1][0]))

    @cached_property
    def imports(self) -> list[tuple[Import, list[ast.stmt], bool]]:
        """(import, its block, early) for every import; early: whether it runs while the file is imported."""
        return [(node, block, early) for _, block, early in self.blocks for node in block if isinstance(node, Import)]

    @cached_property
    def early_nodes(self) -> list[ast.AST]:
        """The nodes that are evaluated while the file is imported."""
        lazy = any(
            isinstance(n, ast.ImportFrom)
            and n.module == "__future__"
            and any(alias.name == "annotations" for alias in n.names)
            for n in self.source.tree.body
        )
        return list(_early(self.source.tree, lazy))


def _early(node: ast.AST, lazy_annotations: bool) -> Iterator[ast.AST]:
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, Function | ast.Lambda):
            arguments = node.args
            stack += [*getattr(node, "decorator_list", []), *arguments.defaults, *filter(None, arguments.kw_defaults)]
            if isinstance(node, Function) and not lazy_annotations:
                stack += [node.returns] if node.returns else []
                every = [part for part in ast.walk(arguments) if isinstance(part, ast.arg)]
                stack += [argument.annotation for argument in every if argument.annotation]
        elif isinstance(node, ast.If) and _NEVER_IMPORTED.search(ast.unparse(node.test)):
            stack += node.orelse
        elif isinstance(node, ast.AnnAssign) and lazy_annotations:
            stack += [node.target, *([node.value] if node.value else [])]
        else:
            stack += ast.iter_child_nodes(node)


class Repository:
    """The Python files of a repository that this Python compiles, in the order of their paths.

    Files that do not compile (templates, other versions of Python) are left out, because nothing imports them.
    """

    def __init__(self, sources: Mapping[str, str], tests: Collection[str]):
        self.modules: dict[str, Module] = {}
        self.sources = sources
        for path in sorted(sources):
            if not path.endswith(".py"):
                continue
            try:
                source = SourceFile(path, sources[path])
            except UserError:
                continue
            self.modules[path] = Module(source, path in tests or is_protected(path))
        self._paths: dict[str, str] = {}
        for path in self.modules:
            for name in self._names(path):
                self._paths.setdefault(name, path)

    @property
    def code(self) -> list[Module]:
        """The modules that are not test code."""
        return [module for module in self.modules.values() if not module.is_test]

    def dotted(self, path: str) -> str:
        """The name that a file is imported by, from the outermost package around it."""
        return self._names(path)[0]

    def _names(self, path: str) -> list[str]:
        place = PurePosixPath(path)
        parts = [*place.parts[:-1], *([] if place.name == "__init__.py" else [place.stem])]
        depth = len(place.parts) - 1
        while depth and "/".join([*place.parts[:depth], "__init__.py"]) in self.sources:
            depth -= 1
        # The second name is that of packages without __init__.py, imported from the root or from src/.
        return [".".join(parts[depth:]), ".".join(parts[parts[:1] == ["src"] :])]

    def target(self, module: Module, node: ast.ImportFrom) -> str:
        """The absolute dotted name of the module in a `from ... import`."""
        if not node.level:
            return node.module or ""
        package = self.dotted(module.path).split(".")
        if PurePosixPath(module.path).name != "__init__.py":
            package = package[:-1]
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *([node.module] if node.module else [])])

    def path_of(self, dotted: str) -> str | None:
        """The file of a dotted module name; None for a module outside the repository."""
        return self._paths.get(dotted)


def bound_names(statement: ast.stmt) -> set[str]:
    """The names that a statement of a module binds, definitions and imports included."""
    names: set[str] = set()
    stack: list[ast.AST] = [statement]
    while stack:
        node = stack.pop()
        if isinstance(node, Function | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, Import):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            names.add(node.id)
        stack += ast.iter_child_nodes(node)
    return names
