"""Parses Python source, one thread at a time: for what runs in threads.

Python 3.11 counts the depth of all syntax trees that are being made in one variable of the interpreter. Code that runs
while a tree is made, such as a callback of the garbage collector (JAX has one), lets another thread go on; if that one
makes a tree as well, `ast.parse` raises "SystemError: AST constructor recursion depth mismatch"
(github.com/python/cpython/issues/106905).
"""

import ast
import threading

_LOCK = threading.RLock()  # reentrant: what the garbage collector calls meanwhile may parse as well


def parse_python(source: str | bytes, path: str = "<unknown>") -> ast.Module:
    """Returns the syntax tree of a module.

    Args:
      path: names the file in errors and warnings.

    Raises:
      SyntaxError, ValueError, RecursionError, MemoryError: as ast.parse does; the last two where code is too deep.
    """
    with _LOCK:
        return ast.parse(source, path)
