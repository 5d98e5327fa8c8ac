"""The definitions of a Python file: functions, methods, properties and classes, nested ones included."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from composer_jax.tasks.repository.source import STRINGS, SourceFile
from composer_jax.tasks.suites.protected import is_protected

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef
Kind = Literal["function", "method", "property", "class"]

_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.comprehension, ast.match_case)


@dataclass(frozen=True, eq=False)
class Entity:
    """A definition of a file.

    name: as in Python's __qualname__ ("Class.method", "outer.<locals>.inner"). Definitions that share a name (a
    property and its setter, overloads) are separate entities with the same id.
    is_test: whether the file belongs to the tests, or the entity is a test or inside one.
    """

    source: SourceFile
    node: Definition
    name: str
    kind: Kind
    is_test: bool

    @property
    def id(self) -> str:
        return f"{self.source.path}::{self.name}"

    @property
    def is_nested(self) -> bool:
        """Whether the definition is inside a function."""
        return "<locals>" in self.name

    @property
    def span(self) -> tuple[int, int]:
        """Characters of the definition, from its first decorator on."""
        return self.source.span(self.node)

    @property
    def docstring(self) -> str | None:
        """The docstring as written, with its indentation."""
        return ast.get_docstring(self.node, clean=False)

    @property
    def statements(self) -> list[ast.stmt]:
        """The body without the docstring; may be empty."""
        return self.node.body[self.docstring is not None :]

    @property
    def signature(self) -> str:
        """The head on one line, without decorators and without the colon: "async def f(a, *, b=1) -> int"."""
        node = self.node
        if isinstance(node, ast.ClassDef):
            bases = ", ".join(ast.unparse(part) for part in [*node.bases, *node.keywords])
            return f"class {node.name}({bases})" if bases else f"class {node.name}"
        result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"{'async ' * isinstance(node, ast.AsyncFunctionDef)}def {node.name}({ast.unparse(node.args)}){result}"

    @cached_property
    def complexity(self) -> int:
        """Cyclomatic complexity: 1 + branches, loops, handlers, match cases, `and`/`or` and comprehension filters."""
        total = 1
        for node in ast.walk(self.node):
            total += isinstance(node, _BRANCHES)
            total += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
            total += len(node.ifs) if isinstance(node, ast.comprehension) else 0
        return total

    @cached_property
    def references(self) -> frozenset[str]:
        """The names and attributes that the definition reads, nested definitions included."""
        return frozenset(reference for node in ast.walk(self.node) if (reference := referenced_name(node)))


def referenced_name(node: ast.AST) -> str | None:
    """The name or attribute that a node reads; None for other nodes."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def outer_ids(entity_id: str) -> list[str]:
    """The ids "path::Qual.name" of what is around a definition, the outermost first."""
    path, _, name = entity_id.partition("::")
    parts = name.split(".")
    return [f"{path}::{'.'.join(parts[:end])}" for end in range(1, len(parts))]


def parse_entities(source: SourceFile) -> list[Entity]:
    """All definitions of a file in the order of their first line; an outer one comes before its inner ones."""
    return list(_inside(source, source.tree, "", None, is_protected(source.path)))


def _inside(
    source: SourceFile, node: ast.AST, prefix: str, owner: Definition | None, is_test: bool
) -> Iterator[Entity]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Definition):
            # A definition may also stand in an `if` or a `try`.
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                yield from _inside(source, child, prefix, owner, is_test)
            continue
        is_class = isinstance(child, ast.ClassDef)
        tests = is_test or child.name.startswith("Test" if is_class else "test_")
        name = prefix + child.name
        yield Entity(source, child, name, _kind(child, owner), tests)
        inner = f"{name}." if is_class else f"{name}.<locals>."
        yield from _inside(source, child, inner, child, tests)


def _kind(node: Definition, owner: Definition | None) -> Kind:
    if isinstance(node, ast.ClassDef):
        return "class"
    if not isinstance(owner, ast.ClassDef):
        return "function"
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    is_property = any(
        text.split(".")[-1] in ("property", "cached_property") or text.endswith((".setter", ".getter", ".deleter"))
        for text in decorators
    )
    return "property" if is_property else "method"


def own_nodes(entity: Entity) -> Iterator[ast.AST]:
    """The nodes of the body outside nested definitions, docstrings and annotations, in the order of the text.

    An f-string is one node, because the positions inside it are unreliable.
    """
    stack: list[ast.AST] = [*entity.statements[::-1]]
    while stack:
        node = stack.pop()
        if isinstance(node, Definition):
            continue
        yield node
        if isinstance(node, STRINGS):
            continue
        skipped = node.annotation if isinstance(node, ast.AnnAssign) else None
        stack += [child for child in ast.iter_child_nodes(node) if child is not skipped][::-1]


def own_blocks(entity: Entity) -> Iterator[tuple[ast.AST, list[ast.stmt]]]:
    """(node, block) for every list of statements of the body outside nested definitions.

    The first is the body itself, with the docstring.
    """
    for node in (entity.node, *own_nodes(entity)):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and block:
                yield node, block
