"""One mutation of one entity: edits of its text and what they do, in words."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from composer_jax.tasks.repository.source import Edit, Source


@dataclass(frozen=True)
class Mutation:
    """what: a few words for people. line: where it happens, from 1. member: for a change of a class that is
    about one of its methods, the method's name."""

    edits: tuple[Edit, ...]
    what: str
    line: int
    member: str = ""


Mutations = Iterator[Mutation]


def replace_node(source: Source, node: ast.expr | ast.stmt, text: str) -> Mutation:
    """The mutation that replaces the whole of `node` by `text`."""
    what = f"{brief(source.segment(node))} became {brief(text)}"
    return Mutation((Edit(*source.span(node), text),), what, node.lineno)


def brief(text: str) -> str:
    """Text for a note: on one line, in backquotes, cut to 40 characters."""
    line = " ".join(text.split())
    return f"`{line if len(line) <= 40 else line[:37] + '...'}`"


def shape(node: ast.AST) -> str:
    """What a node means, apart from where it stands and how it is written."""
    return ast.dump(node)


def operand(source: Source, node: ast.expr, before: str, after: str) -> str:
    """The text of `node` between an operator and its other operand, in parentheses where it needs them.

    For example operand(`a or b`, "", " - 1") is "(a or b)", as `a or b - 1` is something else.
    """
    text = source.segment(node)
    try:
        whole = ast.parse(f"({before}{text}{after})", mode="eval").body
    except SyntaxError:  # it needs them: `yield x - 1` with something before it, for one
        return f"({text})"
    parts = [getattr(whole, field, None) for field in ("left", "right", "operand")]
    parts += getattr(whole, "comparators", [])
    return text if any(part is not None and shape(part) == shape(node) for part in parts) else f"({text})"
