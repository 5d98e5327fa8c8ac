"""The leak gate: what was taken away must be nowhere that the agent can read.

Three ways are looked at in every file of the workspace and of the packages folder: lines of the removed text one after
the other; compiled caches (.pyc) that hold a removed function; and packages that hold the repository's own package.
"""

from __future__ import annotations

import ast
import marshal
import os
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

LINES = 5  # so many lines in a row are not there by chance
SHORT = 4  # shorter lines ("try:" is 4, "]" is 1) are passed over: they are everywhere
LARGEST = 16 << 20  # bytes; larger files are data
PYC_HEADER = 16


@dataclass(frozen=True)
class Leak:
    """path: of the file that gives it away. what: in a few words."""

    path: str
    what: str


class Readable:
    """All files of some folders, read once."""

    def __init__(self, folders: Sequence[Path]):
        self._lines: dict[Path, list[str]] = {}
        self._different: dict[Path, frozenset[str]] = {}
        self._compiled: dict[Path, frozenset[tuple]] = {}
        for path in _files(folders):
            data = path.read_bytes()
            if path.suffix in (".pyc", ".pyo"):
                self._compiled[path] = frozenset(_functions_of_code(_unmarshalled(data)))
            elif (text := _text(data)) is not None:
                self._lines[path] = _lines(text)
                self._different[path] = frozenset(self._lines[path])

    def leaks(
        self, removed: Sequence[str], lines: int = LINES, instead: Mapping[Path, str | None] | None = None
    ) -> list[Leak]:
        """Where removed text can still be read.

        removed: blocks of consecutive lines (Candidate.removed). lines: how many in a row count; a block with fewer
        lines that mean something cannot leak. Indentation does not matter. instead: texts that files of the folders
        are going to have, None for those that will be gone.
        """
        windows = {window for block in removed for window in _windows(_lines(block), lines)}
        functions = {shape for block in removed for shape in _functions_of_text(block)}
        words = {line for window in windows for line in window}
        found = [
            Leak(str(path), "compiled code of a removed function")
            for path, shapes in self._compiled.items()
            if functions & shapes
        ]
        texts = {path: _lines(text or "") for path, text in (instead or {}).items()}
        for path, here in {**self._lines, **texts}.items():
            common = words & self._different[path] if path in self._different and path not in texts else words
            if common and windows & set(_windows(here, lines)):
                found.append(Leak(str(path), f"{lines} removed lines in a row"))
        return found


def installed_copies(packages: Path | None, tops: Collection[str]) -> list[Leak]:
    """Where a folder of installed packages holds packages of the repository itself. tops: their import names."""
    if packages is None:
        return []
    found = []
    for top in sorted(tops):
        for path in (packages / top, packages / f"{top}.py", *packages.glob(f"{top}.*.so")):
            if path.exists():
                found.append(Leak(str(path), "an installed copy of the repository's own package"))
    return found


def _files(folders: Sequence[Path]) -> Iterator[Path]:
    for folder in folders:
        for where, _, names in os.walk(folder):
            for name in sorted(names):
                path = Path(where, name)
                if path.is_file() and not path.is_symlink() and path.stat().st_size <= LARGEST:
                    yield path


def _text(data: bytes) -> str | None:
    return None if b"\0" in data[:8192] else data.decode("utf-8", errors="replace")


def _lines(text: str) -> list[str]:
    stripped = (line.strip() for line in text.splitlines())
    return [line for line in stripped if len(line) > SHORT]


def _windows(lines: list[str], count: int) -> Iterator[tuple[str, ...]]:
    for start in range(len(lines) - count + 1):
        yield tuple(lines[start : start + count])


def _functions_of_text(block: str) -> Iterator[tuple]:
    """The shapes of the functions in a block that can be parsed alone; of other blocks none."""
    try:
        tree = ast.parse(textwrap.dedent(block))
        code = compile(tree, "removed", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return
    yield from _functions_of_code(code)


def _functions_of_code(code: CodeType | None) -> Iterator[tuple]:
    """(name, arguments and variables, names) of every function in a code object that is more than a line."""
    stack = [] if code is None else [code]
    while stack:
        inner = [constant for constant in stack.pop().co_consts if isinstance(constant, CodeType)]
        stack += inner
        yield from (
            (code.co_name, code.co_varnames, code.co_names)
            for code in inner
            if len(code.co_varnames + code.co_names) > 2
        )


def _unmarshalled(data: bytes) -> CodeType | None:
    """The code in a compiled file of this Python, or None of another's."""
    try:
        code = marshal.loads(data[PYC_HEADER:])
    except (EOFError, TypeError, ValueError):
        return None
    return code if isinstance(code, CodeType) else None
