"""Candidates in which one function or method loses its body and keeps its signature and docstring."""

from __future__ import annotations

import ast

from composer_jax.tasks.repository.candidate import Candidate, make_candidate
from composer_jax.tasks.repository.entities import Entity
from composer_jax.tasks.repository.layout import block_region, indentation, starts_line
from composer_jax.tasks.repository.mutate import is_sound
from composer_jax.tasks.repository.source import Edit, apply_edits

BODY = "raise NotImplementedError"


def stub(entity: Entity) -> Candidate | None:
    """The candidate with `raise NotImplementedError` in place of the body and its comments.

    None for a class and for a function that does nothing: an abstract method, an overload.
    """
    source = entity.source
    if entity.kind == "class" or all(_is_trivial(statement) for statement in entity.statements):
        return None
    start, end = block_region(source, entity.statements)
    body = BODY
    if starts_line(source, entity.statements[0]):
        indent = indentation(source, entity.statements[0])
        body = indent + BODY
        # Comments below the last statement belong to the body.
        line = source.line_of(end) + 1
        while source.line(line).startswith(indent) and source.line(line).lstrip().startswith("#"):
            end = source.line_end(line)
            line += 1
    edits = [Edit(start, end, body)]
    if not is_sound(entity, edits):
        return None
    text = apply_edits(source.text, edits)
    note = f"{source.path}:{entity.node.lineno}, {entity.name}: the body was replaced by {BODY}"
    return make_candidate("stub", {source.path: source.text}, {source.path: text}, (entity.id,), note)


def _is_trivial(statement: ast.stmt) -> bool:
    constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    unfinished = isinstance(statement, ast.Raise) and "NotImplementedError" in ast.unparse(statement)
    return isinstance(statement, ast.Pass) or constant or unfinished
