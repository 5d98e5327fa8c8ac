"""One mutation of one entity: edits of its text and a description."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from composer_jax.tasks.repository.source import Edit, SourceFile


@dataclass(frozen=True)
class Mutation:
    """Edits that break an entity.

    what: a few words for people. line: of the first edit, from 1. member: the name of the method that a mutation of
    a class is about.
    """

    edits: tuple[Edit, ...]
    what: str
    line: int
    member: str = ""


Mutations = Iterator[Mutation]


def replace_node(source: SourceFile, node: ast.expr | ast.stmt, text: str) -> Mutation:
    """The mutation that replaces the whole of `node` by `text`."""
    what = f"{quote_code(source.segment(node))} became {quote_code(text)}"
    return Mutation((Edit(*source.span(node), text),), what, node.lineno)


def quote_code(text: str) -> str:
    """Code for a note: on one line, in backquotes, cut to 40 characters."""
    line = " ".join(text.split())
    return f"`{line if len(line) <= 40 else line[:37] + '...'}`"


def dump_ast(node: ast.AST) -> str:
    """A text that is equal for nodes of equal meaning, whatever their position and formatting."""
    return ast.dump(node)


def parenthesize(source: SourceFile, node: ast.expr, before: str, after: str) -> str:
    """The text of `node` as an operand, in parentheses where it needs them between `before` and `after`.

    For example parenthesize(`a or b`, "", " - 1") is "(a or b)", because `a or b - 1` means something else.
    """
    text = source.segment(node)
    try:
        whole = ast.parse(f"({before}{text}{after})", mode="eval").body
    except SyntaxError:  # such as `yield x - 1` behind an operator
        return f"({text})"
    parts = [getattr(whole, field, None) for field in ("left", "right", "operand")]
    parts += getattr(whole, "comparators", [])
    return text if any(part is not None and dump_ast(part) == dump_ast(node) for part in parts) else f"({text})"
