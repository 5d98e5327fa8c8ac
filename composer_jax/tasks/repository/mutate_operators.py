"""Mutations of operators: arithmetic, logic and comparisons."""

from __future__ import annotations

import ast
import random

from composer_jax.tasks.repository.entities import Entity, own_nodes
from composer_jax.tasks.repository.mutation import Mutation, Mutations, parenthesize, quote_code
from composer_jax.tasks.repository.source import STRINGS, Edit, SourceFile, Token

SAME_CLASS = (("+", "-"), ("*", "/", "//", "%"), ("<<", ">>"), ("&", "|", "^"))
"""Operators of about equal precedence that take the same operands."""
OPPOSITE = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "**": "*", "<<": ">>", ">>": "<<"}
OPPOSITE |= {"&": "|", "|": "&", "and": "or", "or": "and"}
NEGATED = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
NEGATED |= {"is": "is not", "is not": "is", "in": "not in", "not in": "in"}
BOUNDARY = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
ORDERED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.LShift, ast.RShift, ast.MatMult)


def operator_between(source: SourceFile, left: ast.AST, right: ast.AST) -> Token:
    """The operator between two operands, without their parentheses; both words of "not in" and "is not"."""
    tokens = source.tokens(source.span(left)[1], source.span(right)[0])
    words = [token for token in tokens if token.text not in "()"]
    return Token(" ".join(token.text for token in words), words[0].start, words[-1].end)


Span = tuple[int, int]
"""First character, and the one after the last."""


def operand_spans(source: SourceFile, whole: ast.expr, left: ast.AST, right: ast.AST) -> tuple[Span, Span]:
    """The spans of the two operands of an operator, with their parentheses."""
    middle = operator_between(source, left, right)
    tokens = list(source.tokens(source.span(left)[1], source.span(right)[0]))
    left_end = max([source.span(left)[1], *(token.end for token in tokens if token.end <= middle.start)])
    right_start = min([source.span(right)[0], *(token.start for token in tokens if token.start >= middle.end)])
    return (source.span(whole)[0], left_end), (right_start, source.span(whole)[1])


def is_string(node: ast.AST) -> bool:
    """Whether an operand is certainly text or bytes, which only + and % apply to."""
    if isinstance(node, ast.BinOp):
        return is_string(node.left) or is_string(node.right)
    return isinstance(node, STRINGS) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _arithmetic(source: SourceFile, entity: Entity) -> list[tuple[ast.BinOp | ast.AugAssign, Token]]:
    """The binary operators and augmented assignments whose operands may be numbers."""
    operations: list[tuple[ast.BinOp | ast.AugAssign, Token]] = []
    for node in own_nodes(entity):
        if isinstance(node, ast.BinOp) and not is_string(node):
            operations.append((node, operator_between(source, node.left, node.right)))
        elif isinstance(node, ast.AugAssign) and not is_string(node.value):
            operations.append((node, operator_between(source, node.target, node.value)))
    return operations


def change_operator(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Replaces an operator by another of its class: `a * b` -> `a % b`, `n << 1` -> `n >> 1`."""
    for node, operator in _arithmetic(source, entity):
        bare = operator.text.removesuffix("=")
        others = [other for group in SAME_CLASS if bare in group for other in group if other != bare]
        if others:
            new = rng.choice(others) + operator.text[len(bare) :]
            yield Mutation((Edit(operator.start, operator.end, new),), f"`{operator.text}` became `{new}`", node.lineno)


def flip_operator(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Replaces an operator by its opposite: `a + b` -> `a - b`, `a and b` -> `a or b`, `-a` -> `a`."""
    for node, operator in _arithmetic(source, entity):
        bare = operator.text.removesuffix("=")
        if bare in OPPOSITE:
            new = OPPOSITE[bare] + operator.text[len(bare) :]
            yield Mutation((Edit(operator.start, operator.end, new),), f"`{operator.text}` became `{new}`", node.lineno)
    for node in own_nodes(entity):
        if isinstance(node, ast.BoolOp):
            operators = [operator_between(source, *pair) for pair in zip(node.values, node.values[1:], strict=False)]
            old, new = operators[0].text, OPPOSITE[operators[0].text]
            edits = tuple(Edit(operator.start, operator.end, new) for operator in operators)
            yield Mutation(edits, f"`{old}` became `{new}`", node.lineno)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert):
            if not isinstance(node.operand, ast.Constant):
                start = source.span(node)[0]
                what = f"{quote_code(source.segment(node))} lost its sign"
                yield Mutation((Edit(start, start + 1),), what, node.lineno)


def swap_operands(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Swaps the operands of an operator that does not commute: `a - b` -> `b - a`, `a in b` -> `b in a`."""
    for node in own_nodes(entity):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ORDERED) and not is_string(node.left):
            left, right = node.left, node.right
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and not isinstance(node.ops[0], ast.Eq | ast.NotEq):
            left, right = node.left, node.comparators[0]
        else:
            continue
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
            continue
        left_span, right_span = operand_spans(source, node, left, right)
        sign = operator_between(source, left, right).text
        # An operand in parentheses can stand anywhere.
        new_left = _operand_text(source, right, right_span, "", f" {sign} x")
        new_right = _operand_text(source, left, left_span, f"x {sign} ", "")
        yield Mutation(
            (Edit(*left_span, new_left), Edit(*right_span, new_right)),
            f"the operands of {quote_code(source.segment(node))} were swapped",
            node.lineno,
        )


def _operand_text(source: SourceFile, node: ast.expr, span: tuple[int, int], before: str, after: str) -> str:
    if span != source.span(node):
        return source.text[slice(*span)]
    return parenthesize(source, node, before, after)


def break_chain(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Removes one operand: `a + b + c` -> `a + b`, `a and b` -> `a`."""
    for node in own_nodes(entity):
        if isinstance(node, ast.BinOp) and isinstance(node.left, ast.BinOp):
            left, right = operand_spans(source, node, node.left, node.right)
            removal = Edit(left[1], right[1]) if rng.random() < 0.5 else Edit(left[0], right[0])
            yield Mutation((removal,), f"{quote_code(source.segment(node))} lost a part", node.lineno)
        elif isinstance(node, ast.BoolOp):
            index = rng.randrange(len(node.values))
            pair = node.values[index - 1 : index + 1] if index else node.values[:2]
            left, right = operand_spans(source, node, *pair)
            if index == 0:
                removal = Edit(left[0], right[0])
            elif index == len(node.values) - 1:
                removal = Edit(left[1], right[1])
            else:
                removal = Edit(left[1], operand_spans(source, node, *node.values[index : index + 2])[0][1])
            yield Mutation((removal,), f"{quote_code(source.segment(node))} lost a part", node.lineno)


def _comparisons(source: SourceFile, entity: Entity, table: dict[str, str]) -> Mutations:
    for node in own_nodes(entity):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, right in zip(operands, operands[1:], strict=False):
                operator = operator_between(source, left, right)
                if operator.text in table:
                    edit = Edit(operator.start, operator.end, table[operator.text])
                    yield Mutation((edit,), f"`{operator.text}` became `{edit.text}`", left.end_lineno or left.lineno)


def compare_flip(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Negates a comparison: `a == b` -> `a != b`, `a < b` -> `a >= b`, `a in b` -> `a not in b`."""
    return _comparisons(source, entity, NEGATED)


def compare_boundary(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Includes or excludes equality in a comparison: `a < b` -> `a <= b`."""
    return _comparisons(source, entity, BOUNDARY)


def negate_condition(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Negates a condition or removes its `not`; conditions of `while` are left, because such loops rarely end."""
    endless = [node.test for node in own_nodes(entity) if isinstance(node, ast.While)]
    for node in own_nodes(entity):
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            if not any(node is test for test in endless):
                start = source.span(node)[0]
                rest = next(source.tokens(start + len("not"), source.span(node)[1])).start
                yield Mutation((Edit(start, rest),), f"{quote_code(source.segment(node))} lost its `not`", node.lineno)
            continue
        tests = [node.test] if isinstance(node, ast.If | ast.IfExp) else getattr(node, "ifs", [])
        for test in tests:
            if not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
                edit = Edit(*source.span(test), f"not {parenthesize(source, test, 'not ', '')}")
                yield Mutation((edit,), f"{quote_code(source.segment(test))} was negated", test.lineno)
