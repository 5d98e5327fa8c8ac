"""Git repositories as they are committed: files and their content, and commits with their changes.

Only committed content is read, never the working tree.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from composer_jax.errors import UserError
from composer_jax.git import GitError, last_line, read_git, run_git, start_git, stream_git

_REGULAR = (b"100644", b"100755")  # modes of files; the others are links and submodules
_NEXT = b"\x00commit "  # a message cannot hold a null byte, and a line of a diff begins with another character


class Blob(NamedTuple):
    """One committed file."""

    path: str
    num_bytes: int
    object_id: str


def is_repository(folder: Path) -> bool:
    """Whether a folder is the root of a git repository, with files or bare."""
    return (folder / ".git").exists() or all((folder / name).exists() for name in ("HEAD", "objects", "refs"))


def head_commit(folder: Path) -> str:
    """Returns the id of the commit that is checked out. Raises UserError without one, or without git."""
    try:
        return run_git("rev-parse", "--verify", "HEAD^{commit}", cwd=folder).decode().strip()
    except GitError as error:
        raise UserError(
            f"the git repository {folder} has no commit that can be read ({last_line(str(error))}); commit its files, "
            "or remove its folder .git"
        ) from None


def list_blobs(folder: Path, commit: str) -> Iterator[Blob]:
    """Yields the files of a commit in the order of their paths, links and submodules excluded."""
    for entry in read_git("ls-tree", "-r", "-l", "-z", commit, cwd=folder).split(b"\0")[:-1]:
        description, path = entry.split(b"\t", 1)
        mode, _, object_id, size = description.split()
        if mode in _REGULAR:
            yield Blob(os.fsdecode(path), int(size), object_id.decode())


class BlobReader:
    """A context manager whose `read` returns the content of files by their object ids."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = start_git("cat-file", "--batch", cwd=folder, stderr=subprocess.DEVNULL)

    def __enter__(self) -> BlobReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # closes its input, which ends it

    def read(self, object_id: str) -> bytes:
        """Returns the content. Raises OSError for an object that is missing or damaged."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        requests.write(object_id.encode() + b"\n")
        requests.flush()
        header = answers.readline().split()
        if len(header) != 3:
            raise OSError(f"{self._folder} lacks the object {object_id}")
        content = answers.read(int(header[2]) + 1)
        return content[:-1]


class Commit(NamedTuple):
    """One commit against its parent. `diff` is None where message and diff are larger than the limit."""

    id: str
    message: bytes
    diff: bytes | None


def read_commits(folder: Path, newest: str, count: int, max_bytes: int) -> Iterator[Commit]:
    """Yields up to `count` commits, `newest` and those before it, without merges."""
    options = "--no-merges -p --root --no-ext-diff --no-textconv --no-color --no-renames --unified=3 --no-notes".split()
    options += ["--src-prefix=a/", "--dst-prefix=b/", "--diff-algorithm=myers", f"--max-count={count}"]
    command = ("-c", "core.quotePath=false", "log", *options, "--format=%x00commit %H%n%B%x00", newest)
    with stream_git(*command, cwd=folder) as output:
        lines = iter(output)
        line = next(lines, b"")
        while line.startswith(_NEXT):
            commit = line.removeprefix(_NEXT).decode().strip()
            message, size = b"", 0
            for line in lines:
                if line.startswith(b"\0"):
                    break
                message += line if len(message) < max_bytes else b""
            size, parts = len(message), []
            line = b""
            for line in lines:
                if line.startswith(_NEXT):
                    break
                size += len(line)
                if size <= max_bytes:
                    parts.append(line)
            yield Commit(commit, message.strip(), b"".join(parts).lstrip(b"\n") if size <= max_bytes else None)


def file_histories(folder: Path, newest: str) -> dict[str, list[str]]:
    """Returns path -> object ids of the versions of each file of a commit, the oldest first.

    The versions are those along the first parents of `newest`, so that each follows from the one before. A file that
    was deleted and added again, or was a link in between, begins with its last addition.
    """
    options = "--first-parent -m --raw --no-abbrev -z --root --no-renames --reverse --format=format:".split()
    histories: dict[str, list[str]] = {}
    fields = iter(read_git("log", *options, newest, cwd=folder).split(b"\0"))
    for entry in fields:
        if not entry.strip():
            continue  # between two commits
        _, mode, _, object_id, _ = entry.strip().split(b" ")
        path = os.fsdecode(next(fields))
        if mode in _REGULAR:
            histories.setdefault(path, []).append(object_id.decode())
        else:
            histories.pop(path, None)
    return histories
