"""Taking statements and list elements out of a file, and moving them, without touching the text around them."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence

from composer_jax.tasks.repository.source import Edit, Source

_REST_OF_LINE = re.compile(r"[ \t\f]*;?[ \t\f]*(#.*)?")


def starts_line(source: Source, node: ast.stmt) -> bool:
    """Whether only white space stands before a statement on its first line."""
    start = source.span(node)[0]
    return not source.text[source.line_start(source.line_of(start)) : start].strip(" \t\f")


def fills_lines(source: Source, node: ast.stmt) -> bool:
    """Whether a statement shares its lines with nothing but white space and a comment."""
    end = source.span(node)[1]
    rest = source.text[end : source.line_end(source.line_of(end))]
    return starts_line(source, node) and _REST_OF_LINE.fullmatch(rest) is not None


def indentation(source: Source, node: ast.stmt) -> str:
    """The white space before a statement that starts its line."""
    start = source.span(node)[0]
    return source.text[source.line_start(source.line_of(start)) : start]


def is_elif(source: Source, node: ast.AST) -> bool:
    return isinstance(node, ast.If) and source.text.startswith("elif", source.span(node)[0])


def without_statements(
    source: Source, block: Sequence[ast.stmt], gone: Collection[ast.stmt], may_be_empty: bool = False
) -> list[Edit]:
    """Takes the statements `gone` out of their block.

    Where a statement has its lines to itself, whole lines go: with the comment behind it, the comments right
    above a definition, and the empty lines that would be too many. A block that would be empty keeps a `pass`,
    unless it is a module's (may_be_empty).
    """
    goes = [any(statement is other for other in gone) for statement in block]
    edits: list[Edit] = []
    runs: list[list[int]] = []  # first and last line of what goes together, first and last index in the block
    for index, statement in enumerate(block):
        if not goes[index]:
            continue
        start, end = source.span(statement)
        following = block[index + 1] if index + 1 < len(block) else None
        if index == 0 and all(goes) and not may_be_empty and not is_elif(source, statement):
            edits.append(Edit(start, end, "pass"))
        elif fills_lines(source, statement):
            first, last = _lines(source, statement)
            if runs and runs[-1][3] == index - 1 and first - 1 - _empty_lines(source, first - 1, -1) == runs[-1][1]:
                runs[-1][1:4:2] = last, index
            else:
                runs.append([first, last, index, index])
        elif following is not None and not starts_line(source, following):
            edits.append(Edit(start, source.span(following)[0]))
        else:
            edits.append(Edit(start, end, "pass"))
    for first, last, from_index, to_index in runs:
        above, below = _empty_lines(source, first - 1, -1), _empty_lines(source, last + 1, 1)
        # Of the empty lines on both sides the larger number stays; at either end of a block none are needed.
        if from_index > 0 and to_index + 1 == len(block):
            first -= above
        elif to_index + 1 < len(block):
            last += min(above, below) if from_index > 0 else below
        edits.append(Edit(source.line_start(first), source.line_start(last + 1)))
    return edits


def _lines(source: Source, statement: ast.stmt) -> tuple[int, int]:
    """The first and the last line of a statement, with the comments right above it where it is a definition."""
    start, end = source.span(statement)
    first, last = source.line_of(start), source.line_of(end)
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        above = comment_lines_above(source, first)
        # At the top of a file they are about the file.
        first = above if above > 1 else first
    return first, last


def _empty_lines(source: Source, line: int, step: int) -> int:
    """How many lines of nothing but white space there are from a line on, upwards (-1) or downwards (1)."""
    count = 0
    while 0 < line <= source.lines and not source.line(line).strip():
        line, count = line + step, count + 1
    return count


def comment_lines_above(source: Source, line: int) -> int:
    """The first of the lines of nothing but comments that end right above a line, or the line itself."""
    while line > 1 and line - 1 not in source.string_lines and source.line(line - 1).lstrip().startswith("#"):
        line -= 1
    return line


def without_elements(source: Source, elements: Sequence[ast.AST], gone: Collection[ast.AST]) -> list[Edit]:
    """Takes elements and their commas out of a comma-separated list; at least one must go.

    A list of which nothing is left also loses a comma after its last element.
    """
    kept = [index for index, element in enumerate(elements) if not any(element is other for other in gone)]
    spans = [source.span(element) for element in elements]
    last = kept[-1] if kept else -1
    edits = [Edit(spans[i][0], spans[i + 1][0]) for i in range(last) if i not in kept]
    if not kept:
        end = spans[-1][1]
        comma = re.compile(r"\s*,").match(source.text, end)
        return [Edit(spans[0][0], comma.end() if comma else end)]
    if last + 1 < len(elements):
        edits.append(Edit(spans[last][1], spans[-1][1]))
    return edits


def block_region(source: Source, block: Sequence[ast.stmt]) -> tuple[int, int]:
    """The characters of a block: where it has lines of its own, with its indentation, with the comments right
    above its first statement and the one behind its last; else just the statements."""
    start, end = source.span(block[0])[0], source.span(block[-1])[1]
    if not starts_line(source, block[0]):
        return start, end
    line, last = comment_lines_above(source, source.line_of(start)), source.line_of(end)
    rest = source.text[end : source.line_end(last)]
    return source.line_start(line), source.line_end(last) if _REST_OF_LINE.fullmatch(rest) else end


def reindented(source: Source, region: tuple[int, int], old: str, new: str) -> str:
    """The lines of a region with the indentation `old` replaced by `new`; the inside of strings stays."""
    first, last = source.line_of(region[0]), source.line_of(region[1])
    lines = []
    for number in range(first, last + 1):
        text = source.text[source.line_start(number) : min(source.line_start(number + 1), region[1])]
        moves = number not in source.string_lines and text.startswith(old)
        lines.append(new + text[len(old) :] if moves else text)
    return "".join(lines)
