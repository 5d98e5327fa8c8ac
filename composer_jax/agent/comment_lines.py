"""Counts the lines that an edit adds to a source file, and those among them that are only comments.

Models that are paid for short thinking have moved their reasoning into comments (Composer 2, arXiv 2603.24477, section
4.2); the ratio of the two counts shows it.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import PurePosixPath

from composer_jax.data.prepare.languages import LANGUAGES
from composer_jax.python_ast import parse_python

MAX_SOURCE = 1 << 20
"""Bytes; a larger file is data more often than code, and is not counted."""
_COUNTED = """.bash .c .cc .cmake .cpp .cs .css .cxx .dart .go .h .hpp .hs .java .jl .js .jsx .kt .lua .mjs .php .pl .py
    .pyi .r .rb .rs .scala .scss .sh .sql .swift .toml .ts .tsx .yaml .yml .zig""".split()
_PREFIXES = {end: language.comment_starts for language in LANGUAGES for end in language.endings if end in _COUNTED}
"""Ending of a file -> beginnings of its comment lines; files with other endings have no comments to count."""

_LINE_END = re.compile(r"\r\n|\r|\n")  # what Python counts as one; str.splitlines knows more


def count_added_lines(path: str, before: bytes, after: bytes) -> tuple[int, int]:
    """Returns (added lines, comment lines among them) of an edit; (0, 0) for a file that is not source code.

    A line counts as often as it occurs more often than before, so moved lines are not added; blank lines never count.
    In Python a comment line holds a comment alone (tokenize) or belongs to a string that is a statement and documents
    nothing: neither its module, class or function nor the variable before it (ast). In other languages, and in Python
    that does not parse, it begins with a comment's marker.
    """
    prefixes = _PREFIXES.get(PurePosixPath(path).suffix.lower())
    if prefixes is None or max(len(before), len(after)) > MAX_SOURCE:
        return 0, 0
    added = _lines(after, path, prefixes) - _lines(before, path, prefixes)
    return added.total(), sum(count for (_, is_comment), count in added.items() if is_comment)


def _lines(source: bytes, path: str, prefixes: tuple[str, ...]) -> Counter[tuple[str, bool]]:
    """(stripped line, whether it is a comment) -> count."""
    lines = _LINE_END.split(source.decode(errors="replace"))
    comments = _python_comments(source) if path.endswith((".py", ".pyi")) else None
    if comments is None:
        comments = {number for number, line in enumerate(lines, 1) if line.lstrip().startswith(prefixes)}
    return Counter((line.strip(), number in comments) for number, line in enumerate(lines, 1) if line.strip())


def _python_comments(source: bytes) -> set[int] | None:
    """The numbers of comment lines; None for source that does not parse."""
    try:
        tree = parse_python(source)
        tokens = list(tokenize.tokenize(io.BytesIO(source).readline))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: deep nesting
        return None
    numbers = {
        token.start[0]
        for token in tokens
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
    }
    for block in ast.walk(tree):
        for before, statement in _neighbours(block):
            if _is_string(statement) and not _is_documentation(block, before):
                numbers.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return numbers


def _neighbours(block: ast.AST) -> list[tuple[ast.stmt | None, ast.stmt]]:
    """(statement before, statement) for the statements of a block; None before the first."""
    pairs: list[tuple[ast.stmt | None, ast.stmt]] = []
    for name in ("body", "orelse", "finalbody"):
        statements = getattr(block, name, None)
        if isinstance(statements, list):
            pairs += zip([None, *statements], statements, strict=False)
    return pairs


def _is_string(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return False
    return isinstance(statement.value.value, str)


def _is_documentation(block: ast.AST, before: ast.stmt | None) -> bool:
    """Whether a string in a block documents the block, or the variable that is assigned before it."""
    if before is None:
        return isinstance(block, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    return isinstance(block, ast.Module | ast.ClassDef) and isinstance(before, ast.Assign | ast.AnnAssign)
