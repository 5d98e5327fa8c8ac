"""The mutations of functions and classes: each breaks one entity by a few edits of its text."""

import ast
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from composer_jax.tasks.repository.entities import Definition, Entity, Function, own_blocks, own_nodes
from composer_jax.tasks.repository.layout import (
    block_region,
    fills_lines,
    indentation,
    is_elif,
    reindent,
    remove_elements,
    remove_statements,
    starts_line,
)
from composer_jax.tasks.repository.source import STRINGS, Edit, SourceFile, Token


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
Span = tuple[int, int]
"""First character, and the one after the last."""


def replace_node(source: SourceFile, node: ast.expr | ast.stmt, text: str) -> Mutation:
    """The mutation that replaces the whole of `node` by `text`."""
    what = f"{quote_code(source.segment(node))} became {quote_code(text)}"
    return Mutation((Edit(*source.span(node), text),), what, node.lineno)


def quote_code(text: str) -> str:
    """Code for a note: on one line, in backquotes, cut to 40 characters."""
    line = " ".join(text.split())
    return f"`{line if len(line) <= 40 else line[:37] + '...'}`"


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
    return text if any(part is not None and ast.dump(part) == ast.dump(node) for part in parts) else f"({text})"


def _swap(source: SourceFile, first: Span, second: Span) -> tuple[Edit, Edit]:
    return Edit(*first, source.text[slice(*second)]), Edit(*second, source.text[slice(*first)])


def _remove_word(source: SourceFile, node: ast.AST, word: str) -> Edit:
    """Removes the keyword that a node begins with."""
    start, end = source.span(node)
    return Edit(start, next(source.tokens(start + len(word), end)).start)


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


WRAPPERS = (ast.With, ast.AsyncWith, ast.Try, ast.TryStar)
_LEAVES = (ast.Return, ast.Raise, ast.Break, ast.Continue, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal)


def if_else_invert(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Swaps the branches of an `if` with an `else` or of a conditional expression."""
    for node in own_nodes(entity):
        if isinstance(node, ast.IfExp):
            spans = source.span(node.body), source.span(node.orelse)
        elif isinstance(node, ast.If) and node.orelse and not is_elif(source, node.orelse[0]):
            if starts_line(source, node.body[0]) != starts_line(source, node.orelse[0]):
                continue
            spans = block_region(source, node.body), block_region(source, node.orelse)
            if starts_line(source, node.body[0]):
                if indentation(source, node.body[0]) != indentation(source, node.orelse[0]):
                    continue
        else:
            continue
        what = f"the branches of {quote_code(source.segment(node.test))} changed places"
        yield Mutation(_swap(source, *spans), what, node.lineno)


def shuffle_lines(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Swaps two neighbouring statements where one of them reads what the other one assigns."""
    for _, block in own_blocks(entity):
        for first, second in zip(block, block[1:], strict=False):
            if not all(fills_lines(source, node) and not isinstance(node, _LEAVES) for node in (first, second)):
                continue
            if not (_assigned_names(first) & _read_names(second) or _assigned_names(second) & _read_names(first)):
                continue
            what = f"{quote_code(source.segment(first))} and {quote_code(source.segment(second))} changed places"
            yield Mutation(_swap(source, source.span(first), source.span(second)), what, first.lineno)


def _assigned_names(statement: ast.stmt) -> set[str]:
    """Texts of the targets that a statement assigns to, and of the objects whose methods it calls."""
    texts = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            texts.add(ast.unparse(node.value if isinstance(node, ast.Subscript) else node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            texts.add(ast.unparse(node.func.value))
    return texts


def _read_names(statement: ast.stmt) -> set[str]:
    return {ast.unparse(node) for node in ast.walk(statement) if isinstance(node, ast.Name | ast.Attribute)}


def remove_each(source: SourceFile, entity: Entity, rng: random.Random, kinds: tuple[type[ast.stmt], ...]) -> Mutations:
    """Removes a whole statement of these kinds; an `elif` goes with the branches behind it."""
    for _, block in own_blocks(entity):
        for node in block:
            if isinstance(node, kinds) and not (isinstance(node, ast.AnnAssign) and node.value is None):
                edits = tuple(remove_statements(source, block, [node]))
                yield Mutation(edits, f"{quote_code(source.segment(node))} was removed", node.lineno)


def remove_wrapper(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Removes a `with` or a `try` and keeps its body; of a `try` also the bodies of `else` and `finally`."""
    for node in own_nodes(entity):
        if not isinstance(node, WRAPPERS):
            continue
        blocks = [block for block in (node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])) if block]
        if all(starts_line(source, block[0]) for block in blocks):
            old, new = indentation(source, node.body[0]), indentation(source, node)
            regions = [block_region(source, block) for block in blocks]
            text = source.newline.join(reindent(source, region, old, new) for region in regions)
            start, end = source.span(node)
            line = source.line_of(end)
            # The edit reaches the end of the last line only if the last block does: text behind it stays.
            last = max(end, regions[-1][1]) if fills_lines(source, node) else end
            edit = Edit(source.line_start(source.line_of(start)), min(last, source.line_end(line)), text)
        elif len(blocks) == 1:
            edit = Edit(*source.span(node), source.text[slice(*block_region(source, blocks[0]))])
        else:
            continue
        yield Mutation((edit,), f"what was around {quote_code(source.segment(node.body[0]))} was removed", node.lineno)


def drop_return(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Removes the `return` before a value; calls in the value still run."""
    for _, block in own_blocks(entity):
        for node in block:
            if not isinstance(node, ast.Return) or node.value is None:
                continue
            if any(isinstance(part, ast.Call | ast.Await | ast.Yield | ast.YieldFrom) for part in ast.walk(node.value)):
                edits: tuple[Edit, ...] = (_remove_word(source, node, "return"),)
            else:
                edits = tuple(remove_statements(source, block, [node]))
            yield Mutation(edits, f"{quote_code(source.segment(node))} no longer returns", node.lineno)


def swallow_except(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Replaces the body of an exception handler by `pass`."""
    for node in own_nodes(entity):
        if isinstance(node, ast.ExceptHandler) and not all(isinstance(part, ast.Pass) for part in node.body):
            edit = Edit(source.span(node.body[0])[0], source.span(node.body[-1])[1], "pass")
            caught = quote_code(source.segment(node.type)) if node.type else "any exception"
            yield Mutation((edit,), f"the handler of {caught} does nothing", node.lineno)


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


def _operand_text(source: SourceFile, node: ast.expr, span: Span, before: str, after: str) -> str:
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


def replace_comparison(source: SourceFile, entity: Entity, rng: random.Random, table: Mapping[str, str]) -> Mutations:
    """Replaces the operator of a comparison: NEGATED makes `a < b` -> `a >= b`, BOUNDARY `a < b` -> `a <= b`."""
    for node in own_nodes(entity):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, right in zip(operands, operands[1:], strict=False):
                operator = operator_between(source, left, right)
                if operator.text in table:
                    edit = Edit(operator.start, operator.end, table[operator.text])
                    yield Mutation((edit,), f"`{operator.text}` became `{edit.text}`", left.end_lineno or left.lineno)


def negate_condition(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Negates a condition or removes its `not`; conditions of `while` are left, because such loops rarely end."""
    endless = [node.test for node in own_nodes(entity) if isinstance(node, ast.While)]
    for node in own_nodes(entity):
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            if not any(node is test for test in endless):
                what = f"{quote_code(source.segment(node))} lost its `not`"
                yield Mutation((_remove_word(source, node, "not"),), what, node.lineno)
            continue
        tests = [node.test] if isinstance(node, ast.If | ast.IfExp) else getattr(node, "ifs", [])
        for test in tests:
            if not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
                edit = Edit(*source.span(test), f"not {parenthesize(source, test, 'not ', '')}")
                yield Mutation((edit,), f"{quote_code(source.segment(test))} was negated", test.lineno)


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
        elif ast.unparse(default) in ("()", "[]", "{}"):
            yield replace_node(source, default, "None")


def swap_arguments(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Swaps two neighbouring arguments of a call: `f(a, b)` -> `f(b, a)`."""
    for node in own_nodes(entity):
        if not isinstance(node, ast.Call):
            continue
        arguments = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg is not None)]
        for first, second in zip(arguments, arguments[1:], strict=False):
            starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
            if starred or ast.dump(first) == ast.dump(second) or source.span(first)[1] > source.span(second)[0]:
                continue
            quoted = f"{quote_code(source.segment(first))} and {quote_code(source.segment(second))}"
            edits = _swap(source, source.span(first), source.span(second))
            yield Mutation(edits, f"the arguments {quoted} changed places", first.lineno)


def drop_await(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Removes an `await`: `await f()` -> `f()`."""
    for node in own_nodes(entity):
        if isinstance(node, ast.Await):
            what = f"{quote_code(source.segment(node))} lost its `await`"
            yield Mutation((_remove_word(source, node, "await"),), what, node.lineno)
