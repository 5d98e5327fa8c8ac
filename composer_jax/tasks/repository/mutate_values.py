"""Mutations of values: constants, bounds, defaults and arguments."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator

from composer_jax.tasks.repository.entities import Entity, own_nodes
from composer_jax.tasks.repository.mutate_operators import operand_spans
from composer_jax.tasks.repository.mutation import Mutation, Mutations, dump_ast, parenthesize, quote_code, replace_node
from composer_jax.tasks.repository.source import Edit, SourceFile


def _neighbour(source: SourceFile, node: ast.expr, value: int, rng: random.Random) -> str:
    """The text of a number one away from an integer literal, in the literal's base; never below zero."""
    near = value + (1 if value == 0 else rng.choice((-1, 1)))
    prefix = source.segment(node)[:2].lower()
    return {"0x": hex, "0o": oct, "0b": bin}.get(prefix, str)(near)


def _integer(node: ast.AST) -> int | None:
    """The value of an integer literal; None for other nodes."""
    value = node.value if isinstance(node, ast.Constant) else None
    return value if type(value) is int else None


def change_constant(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Changes an integer by one, doubles a float, negates a boolean: `n * 8` -> `n * 7`."""
    for node in own_nodes(entity):
        if not isinstance(node, ast.Constant):
            continue
        value = node.value
        if type(value) is int:
            yield replace_node(source, node, _neighbour(source, node, value, rng))
        elif type(value) is bool:
            yield replace_node(source, node, str(not value))
        elif type(value) is float:
            yield replace_node(source, node, repr(value * 2 or 1.0))


def _bounds(entity: Entity) -> Iterator[ast.expr]:
    for node in own_nodes(entity):
        if isinstance(node, ast.Slice):
            yield from (bound for bound in (node.lower, node.upper) if bound is not None)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
            yield from (bound for bound in node.args[:2] if not isinstance(bound, ast.Starred))


def off_by_one(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Moves a bound of a slice or a range by one: `x[1:]` -> `x[2:]`, `range(n)` -> `range(n - 1)`."""
    for bound in _bounds(entity):
        sign = rng.choice("+-")
        value = _integer(bound)
        if value is not None:
            yield replace_node(source, bound, _neighbour(source, bound, value, rng))
        elif isinstance(bound, ast.BinOp) and isinstance(bound.op, ast.Add | ast.Sub) and _integer(bound.right) == 1:
            left, right = operand_spans(source, bound, bound.left, bound.right)
            yield Mutation((Edit(left[1], right[1]),), f"{quote_code(source.segment(bound))} lost its 1", bound.lineno)
        else:
            yield replace_node(source, bound, f"{parenthesize(source, bound, '', f' {sign} 1')} {sign} 1")


def _defaults(entity: Entity) -> Iterator[ast.expr]:
    node = entity.node
    if isinstance(node, ast.ClassDef):
        for statement in entity.statements:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
            if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name):
                if statement.value is not None and not target.id.startswith("__"):
                    yield statement.value
    else:
        yield from (default for default in [*node.args.defaults, *node.args.kw_defaults] if default is not None)


def wrong_default(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Changes the default of a parameter or the value of a class attribute: `width=70` -> `width=71`."""
    for default in _defaults(entity):
        integer = _integer(default)
        if integer is not None:
            yield replace_node(source, default, _neighbour(source, default, integer, rng))
        elif isinstance(default, ast.Constant):
            value = default.value
            if isinstance(value, bool) or value is None:
                yield replace_node(source, default, "True" if value is False else "False")
            elif isinstance(value, float):
                yield replace_node(source, default, repr(value * 2 or 1.0))
            elif isinstance(value, str):
                yield replace_node(source, default, '""' if value else '" "')
        elif isinstance(default, ast.Tuple | ast.List | ast.Dict) and dump_ast(default) in _EMPTY:
            yield replace_node(source, default, "None")


_EMPTY = [dump_ast(ast.parse(text, mode="eval").body) for text in ("()", "[]", "{}")]


def swap_arguments(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Swaps two neighbouring arguments of a call: `f(a, b)` -> `f(b, a)`."""
    for node in own_nodes(entity):
        if not isinstance(node, ast.Call):
            continue
        arguments = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg is not None)]
        for first, second in zip(arguments, arguments[1:], strict=False):
            starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
            if starred or dump_ast(first) == dump_ast(second) or source.span(first)[1] > source.span(second)[0]:
                continue
            texts = source.segment(first), source.segment(second)
            edits = (Edit(*source.span(first), texts[1]), Edit(*source.span(second), texts[0]))
            what = f"the arguments {quote_code(texts[0])} and {quote_code(texts[1])} changed places"
            yield Mutation(edits, what, first.lineno)


def drop_await(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Removes an `await`: `await f()` -> `f()`."""
    for node in own_nodes(entity):
        if isinstance(node, ast.Await):
            start = source.span(node)[0]
            rest = next(source.tokens(start + len("await"), source.span(node)[1])).start
            yield Mutation((Edit(start, rest),), f"{quote_code(source.segment(node))} lost its `await`", node.lineno)
