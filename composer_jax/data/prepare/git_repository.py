"""Git repositories as they are committed: files and their content, and commits with their changes.

Only committed content is read, never the working tree.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from composer_jax.git import GitError, UnreadableRepository, last_line, read_git, run_git, start_git, stream_git

_REGULAR = (b"100644", b"100755")  # modes of files
_LINK = b"120000"  # the other mode is that of submodules
_NEXT = b"\x00commit "  # a message cannot hold a null byte, and a line of a diff begins with another character


class TreeEntry(NamedTuple):
    """One committed file, link or submodule."""

    path: str
    num_bytes: int
    """0 for a file whose content is missing here."""
    object_id: str
    kind: Literal["file", "link", "submodule"]


def is_repository(folder: Path) -> bool:
    """Whether a folder is the root of a git repository, with files or bare."""
    return (folder / ".git").exists() or all((folder / name).exists() for name in ("HEAD", "objects", "refs"))


def head_commit(folder: Path) -> str:
    """Returns the id of the commit that is checked out. Raises UnreadableRepository without one."""
    try:
        return run_git("rev-parse", "--verify", "HEAD^{commit}", cwd=folder).decode().strip()
    except GitError as error:
        raise UnreadableRepository(
            f"the git repository {folder} has no commit that can be read ({last_line(str(error))}); commit its files, "
            "or remove its folder .git"
        ) from None


def list_tree(folder: Path, commit: str) -> Iterator[TreeEntry]:
    """Yields what a commit holds in the order of the paths. Raises UnreadableRepository for a damaged tree."""
    for entry in read_git("ls-tree", "-r", "-l", "-z", commit, cwd=folder).split(b"\0")[:-1]:
        description, path = entry.split(b"\t", 1)
        mode, _, object_id, size = description.split()
        kind = "file" if mode in _REGULAR else "link" if mode == _LINK else "submodule"
        num_bytes = int(size) if size.isdigit() else 0  # "BAD" for a missing object, "-" for a submodule
        yield TreeEntry(os.fsdecode(path), num_bytes, object_id.decode(), kind)


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
    """One commit against its parent."""

    id: str
    message: bytes
    diff: bytes | None
    """None with a reason."""
    reason: str | None
    """Why it is left out: message and diff are larger than the limit, or its parent is missing in a shallow clone."""


def read_commits(folder: Path, newest: str, count: int, max_bytes: int) -> Iterator[Commit]:
    """Yields up to `count` commits, `newest` and those before it, without merges.

    The oldest commits of a shallow clone come last. Their changes are unknown: git shows all of their files as new.
    Raises UnreadableRepository where an object is missing.
    """
    boundary = _shallow_boundary(folder, newest)
    yielded = 0
    for commit in _read_log(folder, [newest, *(f"^{one}" for one in boundary)], count, max_bytes):
        yield commit
        yielded += 1
    for one in boundary[: count - yielded]:
        yield Commit(one, b"", None, "edge of a shallow clone")


def _shallow_boundary(folder: Path, newest: str) -> list[str]:
    """The ids of the commits before `newest`, or itself, that have parents which a shallow clone lacks."""
    path = folder / os.fsdecode(read_git("rev-parse", "--git-path", "shallow", cwd=folder).rstrip(b"\n"))
    if not path.exists():
        return []
    commits = set(read_git("rev-list", newest, cwd=folder).decode().split())
    return sorted(commits.intersection(path.read_text().split()))


def _read_log(folder: Path, revisions: Sequence[str], count: int, max_bytes: int) -> Iterator[Commit]:
    options = "--no-merges -p --root --no-ext-diff --no-textconv --no-color --no-renames --unified=3 --no-notes".split()
    options += ["--src-prefix=a/", "--dst-prefix=b/", "--diff-algorithm=myers", f"--max-count={count}"]
    command = ("-c", "core.quotePath=false", "log", *options, "--format=%x00commit %H%n%B%x00", *revisions)
    waiting = None  # the last commit is whole if git ends well
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
            if waiting is not None:
                yield waiting
            diff = b"".join(parts).lstrip(b"\n") if size <= max_bytes else None
            waiting = Commit(commit, message.strip(), diff, "too large" if diff is None else None)
    if waiting is not None:
        yield waiting


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
