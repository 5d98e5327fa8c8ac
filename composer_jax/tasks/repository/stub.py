"""One function or method loses its body; signature and docstring stay."""

from __future__ import annotations

import ast

from composer_jax.tasks.repository.candidate import Candidate, candidate
from composer_jax.tasks.repository.entities import Entity
from composer_jax.tasks.repository.layout import block_region, indentation, starts_line
from composer_jax.tasks.repository.mutate import is_sound
from composer_jax.tasks.repository.source import Edit, apply_edits

BODY = "raise NotImplementedError"


def stub(entity: Entity) -> Candidate | None:
    """The candidate with `raise NotImplementedError` for the body, comments included.

    None for a class and for a function that does nothing yet: an abstract method, an overload.
    """
    source = entity.source
    if entity.kind == "class" or all(_is_trivial(statement) for statement in entity.statements):
        return None
    start, end = block_region(source, entity.statements)
    body = BODY
    if starts_line(source, entity.statements[0]):
        indent = indentation(source, entity.statements[0])
        body = indent + BODY
        # Comments below the last statement are still the body's.
        line = source.line_of(end) + 1
        while source.line(line).startswith(indent) and source.line(line).lstrip().startswith("#"):
            end = source.line_end(line)
            line += 1
    edits = [Edit(start, end, body)]
    if not is_sound(entity, edits):
        return None
    text = apply_edits(source.text, edits)
    note = f"{source.path}:{entity.node.lineno}, {entity.name}: the body was replaced by {BODY}"
    return candidate("stub", {source.path: source.text}, {source.path: text}, (entity.id,), note)


def _is_trivial(statement: ast.stmt) -> bool:
    constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    unfinished = isinstance(statement, ast.Raise) and "NotImplementedError" in ast.unparse(statement)
    return isinstance(statement, ast.Pass) or constant or unfinished
