"""One Python file as text and as a syntax tree, with the characters of every node."""

import ast
import re
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from composer_jax.errors import UserError

_NEWLINE = re.compile(r"\r\n|\r|\n")
_TOKEN = re.compile(
    r"(?P<skip>#[^\r\n]*|\\(?:\r\n|\r|\n)|\s+)"
    r"|(?P<token>[^\W\d]\w*|(?:\*\*|//|<<|>>)=?|[-+*/%@&|^=!<>:]=|.)",
    re.DOTALL,
)
STRINGS = tuple(getattr(ast, name) for name in ("JoinedStr", "TemplateStr") if hasattr(ast, name))
"""The nodes of strings that hold code."""
_BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True)
class Token:
    """A word or an operator between two nodes, with its character offsets."""

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class Edit:
    """Characters start..end (end excluded) become `text`."""

    start: int
    end: int
    text: str = ""


def apply_edits(text: str, edits: Sequence[Edit]) -> str:
    """`text` after all edits, whose offsets all count in the original. Edits that overlap raise ValueError."""
    pieces, at = [], 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        if edit.start < at:
            raise ValueError(f"the edit at {edit.start} overlaps the one that ends at {at}")
        pieces += [text[at : edit.start], edit.text]
        at = edit.end
    return "".join([*pieces, text[at:]])


def parse(path: str, text: str) -> ast.Module:
    """The syntax tree of a file that also compiles; SyntaxError or ValueError (null bytes) where it does not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about the file concern its authors
        tree = ast.parse(text.removeprefix(_BYTE_ORDER_MARK), path)
        # Parsing alone accepts `return` outside a function and `nonlocal` without a binding.
        compile(tree, path, "exec", dont_inherit=True)
    return tree


class SourceFile:
    """A file that compiles. Offsets are characters of `text`; line ends, tabs and a byte order mark are kept.

    Raises UserError when this Python cannot compile the text.
    """

    def __init__(self, path: str, text: str):
        try:
            self.tree = parse(path, text)
        except (SyntaxError, ValueError) as error:
            raise UserError(f"{path} does not compile with this Python: {error}; leave the file out") from error
        self.path = path
        self.text = text
        first = len(_BYTE_ORDER_MARK) if text.startswith(_BYTE_ORDER_MARK) else 0
        # str.splitlines also ends lines at form feeds and at U+2028, unlike Python.
        self._starts = [first, *(match.end() for match in _NEWLINE.finditer(text))]

    @property
    def newline(self) -> str:
        """The line end of the file's first line."""
        match = _NEWLINE.search(self.text)
        return match.group() if match else "\n"

    @property
    def lines(self) -> int:
        """The number of lines; a final line end starts one more, which is empty."""
        return len(self._starts)

    @cached_property
    def string_lines(self) -> frozenset[int]:
        """Numbers of the lines that begin inside a string, where white space is content."""
        strings: list[Any] = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, STRINGS) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
        ]
        outside = [node for node in strings if node not in self._holders]
        return frozenset(line for node in outside for line in range(node.lineno + 1, node.end_lineno + 1))

    @cached_property
    def _holders(self) -> dict[ast.AST, ast.AST]:
        """Node inside an f-string -> the outermost f-string around it."""
        return {
            inner: node
            for node in reversed(list(ast.walk(self.tree)))  # the outermost is written last
            if isinstance(node, STRINGS)
            for inner in ast.walk(node)
            if inner is not node
        }

    def offset(self, line: int, column: int) -> int:
        """The character of a syntax tree's position: lines count from 1, columns are UTF-8 bytes."""
        start = self._starts[line - 1]
        # A byte is at most a character, so `column` characters hold the first `column` bytes.
        head = self.text[start : start + column]
        return start + (column if head.isascii() else len(head.encode()[:column].decode()))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """The first character of a node and the one after its last; a definition begins at its first decorator.

        A node inside an f-string has the f-string's span, because its own position is wrong before Python 3.12.
        """
        placed: Any = self._holders.get(node, node)
        start = self.offset(placed.lineno, placed.col_offset)
        if decorators := getattr(placed, "decorator_list", []):
            start = self.text.rindex("@", 0, self.offset(decorators[0].lineno, decorators[0].col_offset))
        return start, self.offset(placed.end_lineno, placed.end_col_offset)

    def segment(self, node: ast.AST) -> str:
        """The text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    def line_of(self, offset: int) -> int:
        """Number of the line, from 1, that holds a character."""
        return max(1, bisect_right(self._starts, offset))

    def line_start(self, line: int) -> int:
        """The first character of a line; the line after the last one begins at the end of the text."""
        return self._starts[line - 1] if line <= len(self._starts) else len(self.text)

    def line_end(self, line: int) -> int:
        """The character after a line's text, where its line end begins."""
        return self.line_start(line) + len(self.line(line))

    def line(self, line: int) -> str:
        """The text of a line without its line end."""
        return self.text[self.line_start(line) : self.line_start(line + 1)].rstrip("\r\n")

    def tokens(self, start: int, end: int) -> Iterator[Token]:
        """The tokens between two neighbouring nodes; the stretch must hold neither strings nor numbers."""
        for match in _TOKEN.finditer(self.text, start, end):
            if match["token"]:
                yield Token(match["token"], match.start(), match.end())
