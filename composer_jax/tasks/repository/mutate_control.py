"""Mutations of control flow: branches, loops, the order of statements, and the statements around a block."""

from __future__ import annotations

import ast
import random

from composer_jax.tasks.repository.entities import Entity, own_blocks, own_nodes
from composer_jax.tasks.repository.layout import (
    block_region,
    fills_lines,
    indentation,
    is_elif,
    reindent,
    remove_statements,
    starts_line,
)
from composer_jax.tasks.repository.mutation import Mutation, Mutations, quote_code
from composer_jax.tasks.repository.source import Edit, SourceFile

LOOPS = (ast.For, ast.AsyncFor, ast.While)
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
        texts = [source.text[slice(*span)] for span in spans]
        edits = (Edit(*spans[0], texts[1]), Edit(*spans[1], texts[0]))
        yield Mutation(edits, f"the branches of {quote_code(source.segment(node.test))} changed places", node.lineno)


def shuffle_lines(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Swaps two neighbouring statements where one of them reads what the other one assigns."""
    for _, block in own_blocks(entity):
        for first, second in zip(block, block[1:], strict=False):
            if not all(fills_lines(source, node) and not isinstance(node, _LEAVES) for node in (first, second)):
                continue
            if not (_assigned_names(first) & _read_names(second) or _assigned_names(second) & _read_names(first)):
                continue
            texts = source.segment(first), source.segment(second)
            edits = (Edit(*source.span(first), texts[1]), Edit(*source.span(second), texts[0]))
            yield Mutation(edits, f"{quote_code(texts[0])} and {quote_code(texts[1])} changed places", first.lineno)


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


def remove_conditional(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Removes a whole `if`, or an `elif` with the branches behind it."""
    return _remove_each(source, entity, (ast.If,))


def remove_loop(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Removes a whole loop."""
    return _remove_each(source, entity, LOOPS)


def remove_assign(source: SourceFile, entity: Entity, rng: random.Random) -> Mutations:
    """Removes an assignment, plain or augmented."""
    return _remove_each(source, entity, (ast.Assign, ast.AugAssign, ast.AnnAssign))


def _remove_each(source: SourceFile, entity: Entity, kinds: tuple[type[ast.stmt], ...]) -> Mutations:
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
                start = source.span(node)[0]
                rest = next(source.tokens(start + len("return"), source.span(node)[1])).start
                edits: tuple[Edit, ...] = (Edit(start, rest),)
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
