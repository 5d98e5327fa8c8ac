"""Files -> documents: each by itself, or those of a repository one after the other, in the order of their imports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from composer_jax.data.prepare.import_order import import_order
from composer_jax.data.prepare.languages import TEXT, language_of


@dataclass(frozen=True)
class TextDocument:
    """A document before it is encoded: `context` comes before `last`, the text of its last or only file."""

    name: str
    context: str
    last: str


def file_document(path: str, text: str) -> TextDocument:
    """Returns a document of one file, row or commit."""
    return TextDocument(path, "", text)


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
    """Returns a path as valid UTF-8, which a name on disk need not be: Python holds its bytes by surrogateescape."""
    return path.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")


def with_line_end(text: str) -> str:
    """Returns the text, whose last line ends with \\n."""
    return text if text.endswith("\n") else text + "\n"
