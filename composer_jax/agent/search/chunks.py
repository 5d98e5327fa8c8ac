"""Chunks of text for search: functions and classes of Python, windows of lines of other files."""

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from composer_jax.python_ast import parse_python

MAX_BYTES = 500_000  # a larger file is data
WINDOW, STEP = 40, 30  # lines of a window, and from the start of one to the next
LONG = 80  # lines; a longer function is cut into windows
SNIFFED = 8192  # bytes; a zero byte in them marks a binary file
_PARSED = "composer_chunk"  # the file name in warnings of the parser
warnings.filterwarnings("ignore", module=_PARSED)  # such as those about escape sequences


@dataclass(frozen=True)
class CodeChunk:
    """Lines start..end (from 1, both included) of a file. name: the qualified name of the function or class."""

    path: str
    start: int
    end: int
    name: str
    text: str


def split_chunks(path: str, data: bytes) -> list[CodeChunk]:
    """The chunks of a file in order; none for binary, empty and very large files.

    Functions of more than LONG lines, the lines between functions, and Python that cannot be parsed become windows.
    """
    if len(data) > MAX_BYTES or b"\0" in data[:SNIFFED]:
        return []
    lines = data.decode(errors="replace").split("\n")
    spans = list(_definitions(data, len(lines))) if path.endswith(".py") else []
    pieces, done = [], 0
    for start, end, name in [*spans, (len(lines) + 1, len(lines), "")]:
        pieces += _windows(path, lines, done + 1, start - 1, "")
        pieces += _windows(path, lines, start, end, name)
        done = end
    return pieces


def _definitions(data: bytes, count: int) -> Iterator[tuple[int, int, str]]:
    """(first line, last line, name) of functions, methods and class headers; disjoint, in order."""
    try:
        tree = parse_python(data, _PARSED)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # all that the parser raises
        return
    done = 0
    for start, end, name in _spans(tree.body, ""):
        start, end = max(start, done + 1), min(end, count)
        if start <= end:  # two definitions may share a line
            yield start, end, name
            done = end


def _spans(body: list[ast.stmt], prefix: str) -> Iterator[tuple[int, int, str]]:
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        name = f"{prefix}{node.name}"
        inner = list(_spans(node.body, f"{name}.")) if isinstance(node, ast.ClassDef) else []
        if inner:
            yield start, inner[0][0] - 1, name
            yield from inner
        else:
            yield start, node.end_lineno or node.lineno, name


def _windows(path: str, lines: list[str], start: int, end: int, name: str) -> Iterator[CodeChunk]:
    size = LONG if name else WINDOW
    while start <= end:
        last = end if end - start < size else start + WINDOW - 1
        text = "\n".join(lines[start - 1 : last])
        if text.strip():
            yield CodeChunk(path, start, last, name, text)
        start = last + 1 if last == end else start + STEP
