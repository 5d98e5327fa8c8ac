"""Edits that remove or move statements and list elements and keep the text around them."""

import ast
import re
from collections.abc import Collection, Sequence

from composer_jax.tasks.repository.source import Edit, SourceFile

_REST_OF_LINE = re.compile(r"[ \t\f]*;?[ \t\f]*(#.*)?")


def starts_line(source: SourceFile, node: ast.stmt) -> bool:
    """Whether only white space stands before a statement on its first line."""
    start = source.span(node)[0]
    return not source.text[source.line_start(source.line_of(start)) : start].strip(" \t\f")


def fills_lines(source: SourceFile, node: ast.stmt) -> bool:
    """Whether a statement shares its lines with nothing but white space and a comment."""
    end = source.span(node)[1]
    rest = source.text[end : source.line_end(source.line_of(end))]
    return starts_line(source, node) and _REST_OF_LINE.fullmatch(rest) is not None


def indentation(source: SourceFile, node: ast.stmt) -> str:
    """The white space before a statement that starts its line."""
    start = source.span(node)[0]
    return source.text[source.line_start(source.line_of(start)) : start]


def is_elif(source: SourceFile, node: ast.AST) -> bool:
    return isinstance(node, ast.If) and source.text.startswith("elif", source.span(node)[0])


def remove_statements(
    source: SourceFile, block: Sequence[ast.stmt], removed: Collection[ast.stmt], may_be_empty: bool = False
) -> list[Edit]:
    """The edits that remove the statements `removed` from their block.

    A statement that fills its lines goes with them: with the comment behind it, the comments directly above a
    definition, and surplus empty lines. A block that would be empty keeps a `pass`, unless it is a module's
    (may_be_empty).
    """
    is_removed = [any(statement is other for other in removed) for statement in block]
    edits: list[Edit] = []
    runs: list[list[int]] = []  # of neighbours that go: first and last line, first and last index in the block
    for index, statement in enumerate(block):
        if not is_removed[index]:
            continue
        start, end = source.span(statement)
        following = block[index + 1] if index + 1 < len(block) else None
        if index == 0 and all(is_removed) and not may_be_empty and not is_elif(source, statement):
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
        # The larger number of empty lines on the two sides stays; either end of a block needs none.
        if from_index > 0 and to_index + 1 == len(block):
            first -= above
        elif to_index + 1 < len(block):
            last += min(above, below) if from_index > 0 else below
        edits.append(Edit(source.line_start(first), source.line_start(last + 1)))
    return edits


def _lines(source: SourceFile, statement: ast.stmt) -> tuple[int, int]:
    """The first and the last line of a statement; of a definition with the comments directly above it."""
    start, end = source.span(statement)
    first, last = source.line_of(start), source.line_of(end)
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        above = first_comment_line(source, first)
        # Comments at the top of a file are about the file.
        first = above if above > 1 else first
    return first, last


def _empty_lines(source: SourceFile, line: int, step: int) -> int:
    """The number of consecutive blank lines from a line on, upwards (-1) or downwards (1)."""
    count = 0
    while 0 < line <= source.lines and not source.line(line).strip():
        line, count = line + step, count + 1
    return count


def first_comment_line(source: SourceFile, line: int) -> int:
    """The first of the comment lines directly above a line, or the line itself."""
    while line > 1 and line - 1 not in source.string_lines and source.line(line - 1).lstrip().startswith("#"):
        line -= 1
    return line


def remove_elements(source: SourceFile, elements: Sequence[ast.AST], removed: Collection[ast.AST]) -> list[Edit]:
    """The edits that remove the elements `removed`, at least one, and their commas from a comma-separated list.

    A list that becomes empty also loses the comma after its last element.
    """
    kept = [index for index, element in enumerate(elements) if not any(element is other for other in removed)]
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


def block_region(source: SourceFile, block: Sequence[ast.stmt]) -> tuple[int, int]:
    """The span of a block; where it fills lines, with its indentation, the comments directly above its first
    statement and the comment behind its last."""
    start, end = source.span(block[0])[0], source.span(block[-1])[1]
    if not starts_line(source, block[0]):
        return start, end
    line, last = first_comment_line(source, source.line_of(start)), source.line_of(end)
    rest = source.text[end : source.line_end(last)]
    return source.line_start(line), source.line_end(last) if _REST_OF_LINE.fullmatch(rest) else end


def reindent(source: SourceFile, region: tuple[int, int], old: str, new: str) -> str:
    """The lines of a region with the indentation `old` replaced by `new`, except inside strings."""
    first, last = source.line_of(region[0]), source.line_of(region[1])
    lines = []
    for number in range(first, last + 1):
        text = source.text[source.line_start(number) : min(source.line_start(number + 1), region[1])]
        moves = number not in source.string_lines and text.startswith(old)
        lines.append(new + text[len(old) :] if moves else text)
    return "".join(lines)
