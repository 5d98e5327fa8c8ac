"""The table of mutations by kind, their application to an entity, and the check of a mutated file."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from composer_jax.tasks.repository import mutate_classes as classes
from composer_jax.tasks.repository import mutate_control as control
from composer_jax.tasks.repository import mutate_operators as operators
from composer_jax.tasks.repository import mutate_values as values
from composer_jax.tasks.repository.candidate import Candidate, make_candidate
from composer_jax.tasks.repository.entities import Definition, Entity
from composer_jax.tasks.repository.mutation import Mutations
from composer_jax.tasks.repository.source import Edit, SourceFile, apply_edits, parse

MutationOperator = Callable[[SourceFile, Entity, random.Random], Mutations]

CLASS_MUTATIONS: Mapping[str, MutationOperator] = {
    "class_remove_bases": classes.remove_bases,
    "class_remove_funcs": classes.remove_funcs,
    "class_shuffle_methods": classes.shuffle_methods,
}
FUNCTION_MUTATIONS: Mapping[str, MutationOperator] = {
    "if_else_invert": control.if_else_invert,
    "shuffle_lines": control.shuffle_lines,
    "remove_assign": control.remove_assign,
    "remove_conditional": control.remove_conditional,
    "remove_loop": control.remove_loop,
    "remove_wrapper": control.remove_wrapper,
    "drop_return": control.drop_return,
    "swallow_except": control.swallow_except,
    "break_chain": operators.break_chain,
    "change_operator": operators.change_operator,
    "flip_operator": operators.flip_operator,
    "swap_operands": operators.swap_operands,
    "compare_flip": operators.compare_flip,
    "compare_boundary": operators.compare_boundary,
    "negate_condition": operators.negate_condition,
    "change_constant": values.change_constant,
    "off_by_one": values.off_by_one,
    "swap_arguments": values.swap_arguments,
    "drop_await": values.drop_await,
}
SHARED_MUTATIONS: Mapping[str, MutationOperator] = {"wrong_default": values.wrong_default}
MUTATIONS: Mapping[str, MutationOperator] = {**CLASS_MUTATIONS, **FUNCTION_MUTATIONS, **SHARED_MUTATIONS}

_NOWHERE = object()


def applies_to(kind: str, entity: Entity) -> bool:
    """Whether a kind of mutation applies to the kind of `entity`, class or function."""
    return kind in SHARED_MUTATIONS or (kind in CLASS_MUTATIONS) == (entity.kind == "class")


def mutate(kind: str, entity: Entity, rng: random.Random) -> Iterator[Candidate]:
    """The candidates of all sound mutations of a kind in an entity, in an order drawn from `rng`."""
    source = entity.source
    mutations = list(MUTATIONS[kind](source, entity, rng)) if applies_to(kind, entity) else []
    rng.shuffle(mutations)
    for mutation in mutations:
        if is_sound(entity, mutation.edits):
            text = apply_edits(source.text, mutation.edits)
            name = f"{entity.id}.{mutation.member}" if mutation.member else entity.id
            note = f"{source.path}:{mutation.line}, {entity.name}: {mutation.what}"
            yield make_candidate(f"mutate:{kind}", {source.path: source.text}, {source.path: text}, (name,), note)


def is_sound(entity: Entity, edits: Sequence[Edit]) -> bool:
    """Whether the edited file compiles and differs in meaning inside the entity and nowhere else.

    The edits must stay within the lines of the entity.
    """
    source = entity.source
    statement = next(
        node for node in source.tree.body if node.lineno <= entity.node.lineno <= (node.end_lineno or node.lineno)
    )
    # A statement of a module parses alone as it does within the module, so only the entity's statement is parsed.
    start, end = source.span(statement)
    start, end = source.line_start(source.line_of(start)), source.line_start(source.line_of(end) + 1)
    moved = [Edit(edit.start - start, edit.end - start, edit.text) for edit in edits]
    try:
        tree = parse(source.path, apply_edits(source.text[start:end], moved))
    except (SyntaxError, ValueError):
        return False  # `return` moved where it may not stand, a default before a parameter without one, ...
    old, new = _definitions(statement), [inner for node in tree.body for inner in _definitions(node)]
    index = next(index for index, node in enumerate(old) if node is entity.node)
    # The edits leave the text before the entity, so its index stays.
    if index >= len(new) or (type(new[index]), new[index].name) != (type(entity.node), entity.node.name):
        return False
    elsewhere = _same([statement], tree.body, entity.node, new[index])
    return elsewhere and not _same(entity.node, new[index])


def _definitions(node: ast.AST) -> list[Definition]:
    definitions, stack = [], [node]
    while stack:
        node = stack.pop()
        if isinstance(node, Definition):
            definitions.append(node)
        stack += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)][::-1]
    return definitions


def _same(old: object, new: object, old_hole: object = _NOWHERE, new_hole: object = _NOWHERE) -> bool:
    """Whether two trees are equal, positions and the two holes excepted; the holes must be at the same place."""
    stack = [(old, new)]
    while stack:
        a, b = stack.pop()
        if a is old_hole or b is new_hole:
            if not (a is old_hole and b is new_hole):
                return False
        elif type(a) is not type(b):
            return False
        elif isinstance(a, ast.AST):
            stack += [(getattr(a, field, None), getattr(b, field, None)) for field in a._fields]
        elif isinstance(a, list) and isinstance(b, list):
            if len(a) != len(b):
                return False
            stack += zip(a, b, strict=True)
        elif a != b:
            return False
    return True
