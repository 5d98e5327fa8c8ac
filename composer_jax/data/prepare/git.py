"""Git repositories as they are committed: files and their content, and commits with their changes.

Only committed content is read, never the working tree. The configuration of the user and of the system is not read, and
no program that a repository's configuration names is run, so that a repository always reads the same.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from composer_jax.errors import UserError

_CONFIG = ("-c", "safe.directory=*", "-c", "core.quotePath=false", "-c", "log.showSignature=false")
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
        result = subprocess.run(
            _command(folder, "rev-parse", "--verify", "HEAD^{commit}"), capture_output=True, env=_environment()
        )
    except FileNotFoundError:
        raise UserError(f"reading the git repository {folder} needs the program git; install it") from None
    if result.returncode:
        raise UserError(
            f"the git repository {folder} has no commit that can be read ({_last_line(result.stderr)}); commit its "
            "files, or remove its folder .git"
        )
    return result.stdout.decode().strip()


def list_blobs(folder: Path, commit: str) -> Iterator[Blob]:
    """Yields the files of a commit in the order of their paths, links and submodules excluded."""
    with _running(folder, "ls-tree", "-r", "-l", "-z", commit) as output:
        for entry in output.read().split(b"\0")[:-1]:
            description, path = entry.split(b"\t", 1)
            mode, _, object_id, size = description.split()
            if mode in _REGULAR:
                yield Blob(os.fsdecode(path), int(size), object_id.decode())


class BlobReader:
    """A context manager whose `read` returns the content of files by their object ids."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        command = _command(folder, "cat-file", "--batch")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_environment()
        )

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
    with _running(folder, "log", *options, "--format=%x00commit %H%n%B%x00", newest) as output:
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
    with _running(folder, "log", *options, newest) as output:
        fields = iter(output.read().split(b"\0"))
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


@contextlib.contextmanager
def _running(folder: Path, *arguments: str) -> Iterator[IO[bytes]]:
    """Runs git and gives its output. Raises UserError if git fails."""
    with subprocess.Popen(
        _command(folder, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment()
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        yield process.stdout
        error = process.stderr.read()
    if process.returncode:
        raise UserError(
            f"git {arguments[0]} failed in {folder} ({_last_line(error)}); repair the repository with git fsck, or "
            "leave it out"
        )


def _command(folder: Path, *arguments: str) -> list[str]:
    return ["git", "-C", str(folder), *_CONFIG, *arguments]


def _environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return inherited | {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_NO_LAZY_FETCH": "1",
        "LC_ALL": "C",
    }


def _last_line(output: bytes) -> str:
    return (output.decode(errors="replace").strip().splitlines() or ["git printed nothing"])[-1]
