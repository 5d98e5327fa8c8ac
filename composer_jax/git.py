"""git without the user's settings: no configuration, hooks, helpers, pagers, network or surrounding repository.

Only objects are read, so that a repository always reads the same, and no program that its configuration names is run.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from composer_jax.errors import UserError

_SETTINGS = (
    "core.autocrlf=false",
    f"core.hooksPath={os.devnull}",
    "core.fsmonitor=false",
    "log.showSignature=false",  # would run gpg
    "protocol.allow=never",
    "safe.directory=*",  # a checkout may belong to another user; none of its settings run
)


class GitError(Exception):
    """git exited with an error; its message."""


class UnreadableRepository(UserError):
    """A repository that git cannot read, or only in part."""


def run_git(
    *arguments: str | Path, cwd: Path, stdin: bytes = b"", environment: Mapping[str, str] | None = None
) -> bytes:
    """The standard output of a git command.

    environment: variables such as GIT_DIR, besides those that isolate git.
    Raises GitError for an exit code other than 0, UserError where git is not installed.
    """
    with start_git(*arguments, cwd=cwd, environment=environment) as process:
        output, error = process.communicate(stdin)
    if process.returncode:
        raise GitError(error.decode(errors="replace").strip())
    return output


def read_git(*arguments: str, cwd: Path) -> bytes:
    """The standard output of a git command that reads a repository. Raises UnreadableRepository if git fails."""
    try:
        return run_git(*arguments, cwd=cwd)
    except GitError as error:
        raise _unreadable(cwd, str(error)) from error


@contextlib.contextmanager
def stream_git(*arguments: str, cwd: Path) -> Iterator[IO[bytes]]:
    """As read_git, but gives the output as a stream, which the block reads to its end."""
    with start_git(*arguments, cwd=cwd) as process:
        assert process.stdout is not None and process.stderr is not None
        yield process.stdout
        error = process.stderr.read()
    if process.returncode:
        raise _unreadable(cwd, error.decode(errors="replace"))


def start_git(
    *arguments: str | Path, cwd: Path, environment: Mapping[str, str] | None = None, stderr: int = subprocess.PIPE
) -> subprocess.Popen[bytes]:
    """Starts a git command with pipes to its standard streams. Raises UserError where git is not installed."""
    variables = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": os.devnull,
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_CEILING_DIRECTORIES": str(cwd.resolve().parent),
        **(environment or {}),
    }
    settings = [word for setting in _SETTINGS for word in ("-c", setting)]
    command = ["git", "-C", cwd, "--no-pager", "--no-replace-objects", *settings, *arguments]
    try:
        return subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)
    except FileNotFoundError:
        raise UserError(f"{cwd} needs git, which is not installed; install it") from None


def _unreadable(folder: Path, message: str) -> UnreadableRepository:
    return UnreadableRepository(
        f"git cannot read {folder} ({last_line(message)}); repair the repository with git fsck, or leave it out"
    )


def last_line(message: str) -> str:
    """The last line of what git wrote about an error."""
    return (message.strip().splitlines() or ["git printed nothing"])[-1]
