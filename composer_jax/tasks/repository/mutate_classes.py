"""Mutations of classes: their bases, their methods and the order of these."""

from __future__ import annotations

import ast
import random
from collections.abc import Sequence

from composer_jax.tasks.repository.entities import Definition, Entity, Function
from composer_jax.tasks.repository.layout import fills_lines, remove_elements, remove_statements
from composer_jax.tasks.repository.mutation import Mutation, Mutations, quote_code
from composer_jax.tasks.repository.source import Edit, SourceFile


def remove_bases(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Removes a base class, with the parentheses where they would be empty."""
    node = entity.node
    if not isinstance(node, ast.ClassDef):
        return
    arguments = sorted([*node.bases, *node.keywords], key=source.span)
    for base in node.bases:
        if len(arguments) > 1:
            edits = tuple(remove_elements(source, arguments, [base]))
        else:
            start, end = source.span(base)
            closing = next(token for token in source.tokens(end, len(source.text)) if token.text == ")")
            edits = (Edit(source.text.rindex("(", 0, start), closing.end),)
        yield Mutation(edits, f"the base {quote_code(source.segment(base))} was removed", node.lineno)


def names_read_by_class(body: Sequence[ast.stmt]) -> set[str]:
    """Names that the body of a class reads when it runs, decorators and defaults of its methods included."""
    names: set[str] = set()
    for statement in body:
        parts: list[ast.AST] = [statement]
        if isinstance(statement, Function):
            arguments = statement.args
            parts = [*statement.decorator_list, *arguments.defaults, *filter(None, arguments.kw_defaults)]
        for part in parts:
            names |= {name.id for name in ast.walk(part) if isinstance(name, ast.Name)}
    return names


def remove_funcs(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Removes a method; of a property also the setter."""
    methods = [node for node in entity.node.body if isinstance(node, Function)]
    for name in dict.fromkeys(method.name for method in methods):
        removed = [method for method in methods if method.name == name]
        if name not in names_read_by_class([node for node in entity.node.body if node not in removed]):
            edits = tuple(remove_statements(source, entity.node.body, removed))
            yield Mutation(edits, f"the method {quote_code(name)} was removed", removed[0].lineno, member=name)


def shuffle_methods(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Shuffles the methods without decorators, except those that the body of the class uses."""
    used = names_read_by_class(entity.node.body)
    names = [node.name for node in entity.node.body if isinstance(node, Definition)]
    methods = [
        node
        for node in entity.node.body
        if isinstance(node, Function)
        and not node.decorator_list
        and node.name not in used
        and names.count(node.name) == 1
        and fills_lines(source, node)
    ]
    order = list(methods)
    rng.shuffle(order)
    edits = tuple(
        Edit(*source.span(place), source.segment(method))
        for place, method in zip(methods, order, strict=True)
        if place is not method
    )
    if edits:
        yield Mutation(edits, f"{len(edits)} methods changed places", entity.node.lineno)
