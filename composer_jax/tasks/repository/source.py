"""One Python file as text and as a syntax tree, with the way from a node to its characters."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from composer_jax.errors import UserError

_NEWLINE = re.compile(r"\r\n|\r|\n")
_TOKEN = re.compile(
    r"(?P<skip>#[^\r\n]*|\\(?:\r\n|\r|\n)|\s+)"
    r"|(?P<token>[^\W\d]\w*|(?:\*\*|//|<<|>>)=?|[-+*/%@&|^=!<>:]=|.)",
    re.DOTALL,
)
STRINGS = tuple(getattr(ast, name) for name in ("JoinedStr", "TemplateStr") if hasattr(ast, name))
"""The nodes of strings with code in them."""
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
        warnings.simplefilter("ignore")  # what the file is warned about is not ours to report
        tree = ast.parse(text.removeprefix(_BYTE_ORDER_MARK), path)
        # Parsing alone lets `return` outside a function and `nonlocal` of nothing pass.
        compile(tree, path, "exec", dont_inherit=True)
    return tree


class Source:
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
        # Not str.splitlines: it also ends lines at form feeds and at U+2028, where Python does not.
        self._starts = [first, *(match.end() for match in _NEWLINE.finditer(text))]

    @property
    def newline(self) -> str:
        """How this file ends its lines; the first line decides."""
        match = _NEWLINE.search(self.text)
        return match.group() if match else "\n"

    @property
    def lines(self) -> int:
        """How many lines there are; after a last line end one more, which is empty."""
        return len(self._starts)

    @cached_property
    def string_lines(self) -> frozenset[int]:
        """Numbers of the lines that begin inside a string, where white space is content."""
        return frozenset(
            line
            for node in ast.walk(self.tree)
            if node not in self._holders
            if isinstance(node, STRINGS) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
            for line in range(node.lineno + 1, node.end_lineno + 1)
        )

    @cached_property
    def _holders(self) -> dict[ast.AST, ast.AST]:
        """What is inside an f-string -> the f-string."""
        return {
            inner: node
            for node in reversed(list(ast.walk(self.tree)))  # so that the outermost one is written last
            if isinstance(node, STRINGS)
            for inner in ast.walk(node)
            if inner is not node
        }

    def offset(self, line: int, column: int) -> int:
        """Of a syntax tree's position: lines count from 1, columns are UTF-8 bytes."""
        start = self._starts[line - 1]
        # A byte is at most a character, so `column` characters hold the first `column` bytes.
        head = self.text[start : start + column]
        return start + (column if head.isascii() else len(head.encode()[:column].decode()))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """First character and the one after the last; a definition begins at its first decorator.

        What is inside an f-string has the f-string's span: its own position is wrong before Python 3.12.
        """
        node = self._holders.get(node, node)
        decorators = getattr(node, "decorator_list", [])
        start = self.offset(node.lineno, node.col_offset)
        if decorators:
            start = self.text.rindex("@", 0, self.offset(decorators[0].lineno, decorators[0].col_offset))
        return start, self.offset(node.end_lineno, node.end_col_offset)

    def segment(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def line_of(self, offset: int) -> int:
        """Number of the line, from 1, that holds a character."""
        low, high = 0, len(self._starts)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._starts[middle] <= offset else (low, middle)
        return low + 1

    def line_start(self, line: int) -> int:
        """Where a line begins; the line after the last one begins at the end of the text."""
        return self._starts[line - 1] if line <= len(self._starts) else len(self.text)

    def line_end(self, line: int) -> int:
        """Where a line's text ends, before its line end."""
        return self.line_start(line) + len(self.line(line))

    def line(self, line: int) -> str:
        """The text of a line without its line end."""
        return self.text[self.line_start(line) : self.line_start(line + 1)].rstrip("\r\n")

    def tokens(self, start: int, end: int) -> Iterator[Token]:
        """The tokens of a stretch without strings and numbers: what stands between two neighbouring nodes."""
        for match in _TOKEN.finditer(self.text, start, end):
            if match["token"]:
                yield Token(match["token"], match.start(), match.end())
