"""Files -> documents: each by itself, or those of a repository one after the other, in the order of their imports.

Imports are found by regular expressions, so that files with errors have them too, in Python, JavaScript and TypeScript,
C and C++, Java, Kotlin and Scala. Other files are ordered by their paths only.
"""

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from composer_jax.data.prepare.languages import TEXT, language_of

_PYTHON = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(?:\(([^)]*)\)|([\w, \t]+))|import[ \t]+([\w., \t]+))", re.M
)
_SCRIPT = re.compile(r"""(?:\bfrom\s*|\bimport\s*\(?\s*|\brequire\s*\(\s*)["'](\.[^"'\n]*)["']""")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"\n]+)"', re.M)
_JVM = re.compile(r"^[ \t]*import[ \t]+(?:static[ \t]+)?([\w.]+)", re.M)
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SCRIPT_ENDINGS = ("", *".ts .tsx .js .jsx .mjs .cjs .mts .cts /index.ts /index.tsx /index.js".split())
_ROOTS = ("", "src/", "lib/", "include/", "python/")


@dataclass(frozen=True)
class TextDocument:
    """A document before it is encoded: `context` comes before `last`, the text of its last or only file."""

    name: str
    context: str
    last: str


def repository_documents(files: Mapping[str, str], max_bytes: int) -> Iterator[TextDocument]:
    """Yields documents that hold the files of a repository, path -> text, in the order of their imports.

    Before each file is a comment line of its language with its path. A document ends where the next file would bring it
    over `max_bytes` of UTF-8; a longer file is a document by itself.
    """
    names: list[str] = []
    size = 0
    for path in import_order(files):
        num_bytes = len(files[path].encode()) + len(path) + 10  # with its header, about
        if names and size + num_bytes > max_bytes:
            yield _join(names, files)
            names, size = [], 0
        names.append(path)
        size += num_bytes
    if names:
        yield _join(names, files)


def _join(names: Sequence[str], files: Mapping[str, str]) -> TextDocument:
    parts = []
    for name in names:
        parts += [path_header(name), with_line_end(files[name])]
    return TextDocument(names[-1], "".join(parts[:-1]), parts[-1])


def path_header(path: str) -> str:
    """Returns the line before a file of a repository: its path, as a comment of its language."""
    return (language_of(path) or TEXT).comment_line(printable_path(path))


def printable_path(path: str) -> str:
    """Returns a path as one line of valid UTF-8, which a name on disk need not be.

    Python holds its bytes by surrogateescape. Line breaks and other control characters are written as escapes (\\n).
    """
    valid = path.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), valid)


def with_line_end(text: str) -> str:
    """Returns the text, whose last line ends with \\n."""
    return text if text.endswith("\n") else text + "\n"


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
