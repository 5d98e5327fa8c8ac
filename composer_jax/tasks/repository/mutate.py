"""Candidates that break one entity: the table of mutations by kind, stubs, and the check of a changed file."""

import ast
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from composer_jax.tasks.repository import mutations
from composer_jax.tasks.repository.candidate import Candidate, make_candidate
from composer_jax.tasks.repository.entities import Definition, Entity
from composer_jax.tasks.repository.layout import block_region, indentation, starts_line
from composer_jax.tasks.repository.source import Edit, SourceFile, apply_edits, parse

MutationOperator = Callable[[SourceFile, Entity, random.Random], mutations.Mutations]

CLASS_MUTATIONS: Mapping[str, MutationOperator] = {
    "class_remove_bases": mutations.remove_bases,
    "class_remove_funcs": mutations.remove_funcs,
    "class_shuffle_methods": mutations.shuffle_methods,
}
FUNCTION_MUTATIONS: Mapping[str, MutationOperator] = {
    "if_else_invert": mutations.if_else_invert,
    "shuffle_lines": mutations.shuffle_lines,
    "remove_assign": partial(mutations.remove_each, kinds=(ast.Assign, ast.AugAssign, ast.AnnAssign)),
    "remove_conditional": partial(mutations.remove_each, kinds=(ast.If,)),
    "remove_loop": partial(mutations.remove_each, kinds=(ast.For, ast.AsyncFor, ast.While)),
    "remove_wrapper": mutations.remove_wrapper,
    "drop_return": mutations.drop_return,
    "swallow_except": mutations.swallow_except,
    "break_chain": mutations.break_chain,
    "change_operator": mutations.change_operator,
    "flip_operator": mutations.flip_operator,
    "swap_operands": mutations.swap_operands,
    "compare_flip": partial(mutations.replace_comparison, table=mutations.NEGATED),
    "compare_boundary": partial(mutations.replace_comparison, table=mutations.BOUNDARY),
    "negate_condition": mutations.negate_condition,
    "change_constant": mutations.change_constant,
    "off_by_one": mutations.off_by_one,
    "swap_arguments": mutations.swap_arguments,
    "drop_await": mutations.drop_await,
}
SHARED_MUTATIONS: Mapping[str, MutationOperator] = {"wrong_default": mutations.wrong_default}
MUTATIONS: Mapping[str, MutationOperator] = {**CLASS_MUTATIONS, **FUNCTION_MUTATIONS, **SHARED_MUTATIONS}

_NOWHERE = object()
STUB_BODY = "raise NotImplementedError"


def applies_to(kind: str, entity: Entity) -> bool:
    """Whether a kind of mutation applies to the kind of `entity`, class or function."""
    return kind in SHARED_MUTATIONS or (kind in CLASS_MUTATIONS) == (entity.kind == "class")


def mutate(kind: str, entity: Entity, rng: random.Random) -> Iterator[Candidate]:
    """The candidates of all sound mutations of a kind in an entity, in an order drawn from `rng`."""
    source = entity.source
    possible = list(MUTATIONS[kind](source, entity, rng)) if applies_to(kind, entity) else []
    rng.shuffle(possible)
    for mutation in possible:
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


def stub(entity: Entity) -> Candidate | None:
    """The candidate with `raise NotImplementedError` in place of the body and its comments.

    None for a class and for a function that does nothing: an abstract method, an overload.
    """
    source = entity.source
    if entity.kind == "class" or all(_is_trivial(statement) for statement in entity.statements):
        return None
    start, end = block_region(source, entity.statements)
    body = STUB_BODY
    if starts_line(source, entity.statements[0]):
        indent = indentation(source, entity.statements[0])
        body = indent + STUB_BODY
        # Comments below the last statement belong to the body.
        line = source.line_of(end) + 1
        while source.line(line).startswith(indent) and source.line(line).lstrip().startswith("#"):
            end = source.line_end(line)
            line += 1
    edits = [Edit(start, end, body)]
    if not is_sound(entity, edits):
        return None
    text = apply_edits(source.text, edits)
    note = f"{source.path}:{entity.node.lineno}, {entity.name}: the body was replaced by {STUB_BODY}"
    return make_candidate("stub", {source.path: source.text}, {source.path: text}, (entity.id,), note)


def _is_trivial(statement: ast.stmt) -> bool:
    constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    unfinished = isinstance(statement, ast.Raise) and "NotImplementedError" in ast.unparse(statement)
    return isinstance(statement, ast.Pass) or constant or unfinished
