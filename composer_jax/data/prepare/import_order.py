"""The files of a repository in the order of their imports: what a file imports comes before it.

Imports are found by regular expressions, so that files with errors have them too, in Python, JavaScript and TypeScript,
C and C++, Java, Kotlin and Scala. Other files are ordered by their paths only.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping

from composer_jax.data.prepare.languages import language_of

_PYTHON = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(?:\(([^)]*)\)|([\w, \t]+))|import[ \t]+([\w., \t]+))", re.M
)
_SCRIPT = re.compile(r"""(?:\bfrom\s*|\bimport\s*\(?\s*|\brequire\s*\(\s*)["'](\.[^"'\n]*)["']""")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"\n]+)"', re.M)
_JVM = re.compile(r"^[ \t]*import[ \t]+(?:static[ \t]+)?([\w.]+)", re.M)
_SCRIPT_ENDINGS = ("", *".ts .tsx .js .jsx .mjs .cjs .mts .cts /index.ts /index.tsx /index.js".split())
_ROOTS = ("", "src/", "lib/", "include/", "python/")


def import_order(files: Mapping[str, str]) -> list[str]:
    """Returns the paths of `files` (path -> text), each after the files that it imports, as far as cycles allow.

    The result depends on the paths and texts only: files are visited in the order of their paths, the imports of each
    likewise, and an import that closes a cycle does not count.
    """
    suffixes = _suffixes(files)
    visited: set[str] = set()
    order: list[str] = []
    for start in sorted(files):
        if start in visited:
            continue
        visited.add(start)
        stack = [(start, iter(sorted(_imports(start, files[start], files, suffixes))))]
        while stack:  # depth first, without recursion, which long chains of imports would exhaust
            path, rest = stack[-1]
            following = next((other for other in rest if other not in visited), None)
            if following is None:
                order.append(path)
                stack.pop()
            else:
                visited.add(following)
                stack.append((following, iter(sorted(_imports(following, files[following], files, suffixes)))))
    return order


def _suffixes(files: Mapping[str, str]) -> dict[str, list[str]]:
    """Every end of two or more components of every path, and the paths that have it."""
    table: dict[str, list[str]] = {}
    for path in sorted(files):
        parts = path.split("/")
        for start in range(len(parts) - 1):
            table.setdefault("/".join(parts[start:]), []).append(path)
    return table


def _imports(path: str, text: str, files: Mapping[str, str], suffixes: Mapping[str, list[str]]) -> set[str]:
    """The files that a file imports, without itself."""
    language = language_of(path)
    name = language.name if language else ""
    folder = posixpath.dirname(path)
    if name == "python":
        imported = _python_imports(text, folder, files, suffixes)
    elif name in ("javascript", "typescript"):
        places = [posixpath.normpath(posixpath.join(folder, match)) for match in _SCRIPT.findall(text)]
        imported = (_first([place + ending for ending in _SCRIPT_ENDINGS], files) for place in places)
    elif name in ("c", "cpp"):
        imported = (
            _first([posixpath.normpath(posixpath.join(folder, match))], files) or _near(match, path, suffixes, files)
            for match in _INCLUDE.findall(text)
        )
    elif name in ("java", "kotlin", "scala"):
        ending = posixpath.splitext(path)[1]
        imported = (_near(match.replace(".", "/") + ending, path, suffixes, files) for match in _JVM.findall(text))
    else:
        return set()
    return {other for other in imported if other is not None and other != path}


def _python_imports(
    text: str, folder: str, files: Mapping[str, str], suffixes: Mapping[str, list[str]]
) -> Iterator[str | None]:
    def module(dotted: str, base: str | None) -> str | None:
        """The file of a module: below `base` for a relative import, else anywhere."""
        place = dotted.replace(".", "/")
        names = [f"{place}.py", f"{place}/__init__.py"] if place else ["__init__.py"]
        if base is not None:
            return _first([posixpath.join(base, name) for name in names], files)
        beside = [posixpath.join(folder, name) for name in names]
        return _first(beside, files) or next(filter(None, (_near(n, folder, suffixes, files) for n in names)), None)

    for dots, base_module, several, imported, plain in _PYTHON.findall(text):
        if plain:
            for one in plain.split(","):
                yield module(one.split()[0], None) if one.split() else None
            continue
        base = None
        if dots:
            base = folder
            for _ in dots[1:]:
                base = posixpath.dirname(base)
        yield module(base_module, base)
        for one in (several or imported).split(","):
            if one.split():
                yield module(f"{base_module}.{one.split()[0]}".lstrip("."), base)


def _first(paths: list[str], files: Mapping[str, str]) -> str | None:
    return next((path for path in paths if path in files), None)


def _near(name: str, importer: str, suffixes: Mapping[str, list[str]], files: Mapping[str, str]) -> str | None:
    """The file whose path ends in `name`: of several, the one that shares most of its path with the importer."""
    at_root = _first([root + name for root in _ROOTS], files)
    if at_root is not None:
        return at_root
    found = suffixes.get(name, ())
    return max(found, key=lambda path: len(posixpath.commonprefix([path, importer])), default=None)
