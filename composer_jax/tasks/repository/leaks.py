"""The leak gate: removed code must not be readable anywhere by the agent.

It searches every file of the workspace and of the packages folder for consecutive removed lines, for compiled caches
(.pyc) that hold a removed function, and for installed copies of the repository's own package.
"""

import ast
import marshal
import os
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

LINES_IN_A_ROW = 5  # fewer equal lines may be a coincidence
MAX_SHORT_LINE = 4  # characters; such lines ("try:", "]") occur everywhere and are skipped
MAX_BYTES = 16 << 20  # bytes; larger files are data
PYC_HEADER = 16


@dataclass(frozen=True)
class Leak:
    """path: the file that holds removed code. what: a few words for people."""

    path: str
    what: str


class ReadableFiles:
    """The contents of all files of some folders, read once."""

    def __init__(self, folders: Sequence[Path]):
        self._lines: dict[Path, list[str]] = {}
        self._line_sets: dict[Path, frozenset[str]] = {}
        self._compiled: dict[Path, frozenset[tuple]] = {}
        for path in _files(folders):
            data = path.read_bytes()
            if path.suffix in (".pyc", ".pyo"):
                self._compiled[path] = frozenset(_functions_of_code(_load_code(data)))
            elif b"\0" not in data[:8192]:
                self._lines[path] = _lines(data.decode("utf-8", errors="replace"))
                self._line_sets[path] = frozenset(self._lines[path])

    def find_leaks(
        self, removed: Sequence[str], lines: int = LINES_IN_A_ROW, replacements: Mapping[Path, str | None] | None = None
    ) -> list[Leak]:
        """The files in which removed text can still be read.

        removed: blocks of consecutive lines (Candidate.removed), compared without indentation.
        lines: how many consecutive equal lines are a leak; shorter blocks cannot leak.
        replacements: the texts that files of the folders will have; None for files that will be deleted.
        """
        windows = {window for block in removed for window in _windows(_lines(block), lines)}
        functions = {shape for block in removed for shape in _functions_of_text(block)}
        words = {line for window in windows for line in window}
        leaks = [
            Leak(str(path), "compiled code of a removed function")
            for path, shapes in self._compiled.items()
            if functions & shapes
        ]
        texts = {path: _lines(text or "") for path, text in (replacements or {}).items()}
        for path, file_lines in {**self._lines, **texts}.items():
            common = words & self._line_sets[path] if path in self._line_sets and path not in texts else words
            if common and windows & set(_windows(file_lines, lines)):
                leaks.append(Leak(str(path), f"{lines} removed lines in a row"))
        return leaks


def find_installed_copies(packages: Path | None, import_names: Collection[str]) -> list[Leak]:
    """The packages of the repository itself (by their import names) in a folder of installed packages."""
    if packages is None:
        return []
    leaks = []
    for top in sorted(import_names):
        for path in (packages / top, packages / f"{top}.py", *packages.glob(f"{top}.*.so")):
            if path.exists():
                leaks.append(Leak(str(path), "an installed copy of the repository's own package"))
    return leaks


def _files(folders: Sequence[Path]) -> Iterator[Path]:
    for folder in folders:
        for where, _, names in os.walk(folder):
            for name in sorted(names):
                path = Path(where, name)
                if path.is_file() and not path.is_symlink() and path.stat().st_size <= MAX_BYTES:
                    yield path


def _lines(text: str) -> list[str]:
    stripped = (line.strip() for line in text.splitlines())
    return [line for line in stripped if len(line) > MAX_SHORT_LINE]


def _windows(lines: list[str], count: int) -> Iterator[tuple[str, ...]]:
    for start in range(len(lines) - count + 1):
        yield tuple(lines[start : start + count])


def _functions_of_text(block: str) -> Iterator[tuple]:
    """(name, variables, names) of the functions in a block; none where it cannot be parsed alone."""
    try:
        tree = ast.parse(textwrap.dedent(block))
        code = compile(tree, "removed", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return
    yield from _functions_of_code(code)


def _functions_of_code(code: CodeType | None) -> Iterator[tuple]:
    """(name, arguments and variables, names) of every function in a code object, except the trivial ones."""
    stack = [] if code is None else [code]
    while stack:
        inner = [constant for constant in stack.pop().co_consts if isinstance(constant, CodeType)]
        stack += inner
        yield from (
            (code.co_name, code.co_varnames, code.co_names)
            for code in inner
            if len(code.co_varnames + code.co_names) > 2
        )


def _load_code(data: bytes) -> CodeType | None:
    """The code in a compiled file; None where another version of Python wrote it."""
    try:
        code = marshal.loads(data[PYC_HEADER:])
    except (EOFError, TypeError, ValueError):
        return None
    return code if isinstance(code, CodeType) else None
