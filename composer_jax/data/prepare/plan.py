"""The plan: sources -> units of a few megabytes, each written to disk as soon as it is full.

A unit is what one worker reads at once. It holds parts, each of one repository, folder or file; a part lists its files,
or names the bytes or row groups of its file.
"""

import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from composer_jax.atomic_write import write_atomically
from composer_jax.data.prepare.config import PrepareConfig
from composer_jax.data.prepare.filters import reason_by_path
from composer_jax.data.prepare.git_repository import head_commit, is_repository, list_tree
from composer_jax.data.prepare.languages import language_of
from composer_jax.data.row_files import parquet_ranges
from composer_jax.errors import UserError
from composer_jax.git import UnreadableRepository

Kind = Literal["folder", "git", "commits", "jsonl", "parquet", "left out"]
_MOST_FILES = 100_000  # that are listed before they are written, so that a large folder needs little memory
_COMMIT_BYTES = 4_000  # of message and diff, to share the commits of many repositories among units


@dataclass(frozen=True)
class Part:
    """What is read of one repository, folder or file."""

    kind: Kind
    source: str
    """The source as the user named it."""
    name: str
    """Path of the repository below the source; "." for the source itself."""
    root: str
    """Absolute path of the folder or file."""
    entries: Sequence[Sequence[Any]]
    """folder: (path, bytes); git: (path, bytes, object id); commits: (most commits,); jsonl: (first byte, end);
    parquet: (first row group, end); left out: (path, bytes, reason)."""
    commit: str = ""
    """git, commits: the commit that is read."""


@dataclass(frozen=True)
class WorkUnit:
    """What one worker reads at once."""

    number: int
    parts: Sequence[Part]
    num_bytes: int
    """Of the files that are read."""


def unit_file(out: Path, number: int) -> Path:
    """Returns the path of a unit's file."""
    return out / "units" / f"{number:05d}.json"


def read_unit(path: Path) -> WorkUnit:
    """Reads a file of `write_units`."""
    content = json.loads(path.read_text(encoding="utf-8", errors="surrogateescape"))
    return WorkUnit(content["number"], [Part(**part) for part in content["parts"]], content["num_bytes"])


def write_units(sources: Sequence[str], config: PrepareConfig, out: Path) -> list[int]:
    """Writes the units of all sources below `out`, and returns the bytes of each.

    Raises UserError for a source that does not exist, holds nothing, or is of an unknown kind.
    """
    sizes: list[int] = []
    parts: list[Part] = []
    size = 0

    def close() -> None:
        nonlocal parts, size
        if parts:
            unit = {"number": len(sizes), "parts": [asdict(part) for part in parts], "num_bytes": size}
            text = json.dumps(unit, ensure_ascii=False)
            write_atomically(unit_file(out, len(sizes)), text.encode("utf-8", errors="surrogateescape"))
            sizes.append(size)
        parts, size = [], 0

    for source in sources:
        for part, part_bytes in _parts(source, config):
            if size + part_bytes > config.unit_bytes:
                close()
            parts.append(part)
            size += part_bytes
    close()
    return sizes


def _parts(source: str, config: PrepareConfig) -> Iterator[tuple[Part, int]]:
    """Yields the parts of a source with their bytes, each of about `unit_bytes` at most."""
    root = Path(source).expanduser().resolve()
    if not root.exists():
        raise UserError(f"--source={source} does not exist; name a folder, a git repository, or a file of rows")
    if root.is_dir():
        yield from _folder_parts(source, root, config)
    elif root.suffix == ".jsonl":
        size, step = root.stat().st_size, config.unit_bytes
        for start in range(0, size, step):
            end = min(start + step, size)
            yield Part("jsonl", source, ".", str(root), [(start, end)]), end - start
    elif root.suffix == ".parquet":
        for first, end, size in parquet_ranges(root, config.text_field, config.unit_bytes):
            yield Part("parquet", source, ".", str(root), [(first, end)]), size
    else:
        raise UserError(
            f"--source={source} is neither a folder nor a .jsonl or .parquet file; convert it to one of them"
        )


def _folder_parts(source: str, root: Path, config: PrepareConfig) -> Iterator[tuple[Part, int]]:
    """Yields the git repositories in a folder, and its other files as one repository."""
    loose: list[tuple[str, int]] = []
    others: list[tuple[str, int, str]] = []

    def parts() -> Iterator[tuple[Part, int]]:
        yield from _split(Part("folder", source, ".", str(root), loose), config)
        if others:
            yield Part("left out", source, ".", str(root), others), 0

    def on_error(error: OSError) -> None:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}); make it readable, or leave it out")

    for parent, folders, files in os.walk(root, onerror=on_error):
        folder = Path(parent)
        if is_repository(folder):
            folders.clear()
            yield from _git_parts(source, root, folder, config)
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        below = "" if folder == root else f"{folder.relative_to(root).as_posix()}/"
        for name in sorted([*files, *(name for name in folders if os.path.islink(f"{parent}/{name}"))]):
            status = os.lstat(f"{parent}/{name}")
            if stat.S_ISREG(status.st_mode):
                loose.append((below + name, status.st_size))
            else:  # a link would be read twice, and a pipe would block
                kind = "link" if stat.S_ISLNK(status.st_mode) else "unreadable"
                others.append((below + name, status.st_size, kind))
            if len(loose) + len(others) >= _MOST_FILES:
                yield from parts()
                loose, others = [], []
    yield from parts()


def _git_parts(source: str, root: Path, folder: Path, config: PrepareConfig) -> Iterator[tuple[Part, int]]:
    name = folder.relative_to(root).as_posix()
    try:
        commit = head_commit(folder)
        entries = list(list_tree(folder, commit))
    except UnreadableRepository:
        if folder == root:  # of several, the others are still read
            raise
        yield Part("left out", source, name, str(folder), [(".", 0, "unreadable repository")]), 0
        return
    blobs = [entry[:3] for entry in entries if entry.kind == "file"]
    others = [(entry.path, entry.num_bytes, entry.kind) for entry in entries if entry.kind != "file"]
    yield from _split(Part("git", source, name, str(folder), blobs, commit), config)
    if others:
        yield Part("left out", source, name, str(folder), others), 0
    if config.commits:
        size = min(config.commits * _COMMIT_BYTES, config.unit_bytes)
        yield Part("commits", source, name, str(folder), [(config.commits,)], commit), size


def _split(part: Part, config: PrepareConfig) -> Iterator[tuple[Part, int]]:
    """Cuts a part of many files into several. Files that are left out without being read count nothing."""
    entries: list[Sequence[Any]] = []
    size = 0
    for entry in part.entries:
        path, num_bytes = entry[:2]
        if num_bytes > config.max_file_bytes or reason_by_path(path, language_of(path), config.languages):
            num_bytes = 0
        if entries and size + num_bytes > config.unit_bytes:
            yield Part(part.kind, part.source, part.name, part.root, entries, part.commit), size
            entries, size = [], 0
        entries.append(entry)
        size += num_bytes
    if entries:
        yield Part(part.kind, part.source, part.name, part.root, entries, part.commit), size
