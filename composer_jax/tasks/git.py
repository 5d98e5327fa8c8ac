"""git without the user's settings: no configuration, hooks, helpers, pagers, network or surrounding repository."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from composer_jax.errors import UserError

_SETTINGS = (
    "core.autocrlf=false",
    f"core.hooksPath={os.devnull}",
    "core.fsmonitor=false",
    "protocol.allow=never",
    "safe.directory=*",  # a checkout may belong to another user; only objects are read and none of its settings run
)


class GitError(Exception):
    """git exited with an error; its message."""


def run_git(
    *arguments: str | Path, cwd: Path, stdin: bytes = b"", environment: Mapping[str, str] | None = None
) -> bytes:
    """The standard output of a git command.

    environment: variables such as GIT_DIR, besides those that isolate git.
    Raises GitError for an exit code other than 0, UserError where git is not installed.
    """
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
    command = ["git", "--no-pager", "--no-replace-objects", *settings, *map(str, arguments)]
    try:
        done = subprocess.run(command, cwd=cwd, env=variables, input=stdin, capture_output=True, check=False)
    except FileNotFoundError:
        raise UserError("tasks of repositories need git, which is not installed; install it") from None
    if done.returncode:
        raise GitError(done.stderr.decode(errors="replace").strip())
    return done.stdout


class GitRepository:
    """The objects of a git repository, read only."""

    def __init__(self, folder: Path):
        """Raises UserError where `folder` is not the top of a git repository with a commit."""
        self.folder = folder.resolve()
        try:
            run_git("rev-parse", "--verify", "--quiet", "HEAD^{commit}", cwd=self.folder)
        except (GitError, NotADirectoryError):
            raise UserError(
                f"{folder} is not a git repository with a commit; give the folder that holds .git"
            ) from None

    def output(self, *arguments: str) -> bytes:
        """The standard output of a git command. Raises UserError with git's message."""
        try:
            return run_git(*arguments, cwd=self.folder)
        except GitError as error:
            raise UserError(
                f"git {' '.join(arguments)} failed in {self.folder}: {error}; check the repository"
            ) from error

    def lines(self, *arguments: str) -> list[str]:
        """The lines of `output`, with surrogate escapes for bytes that are not UTF-8."""
        return self.output(*arguments).decode(errors="surrogateescape").splitlines()

    def changed_paths(self, commit: str) -> list[str]:
        """The paths of regular files that a commit added, changed or deleted; a renamed file counts as two."""
        raw = self.output("diff-tree", "-r", "-z", "--no-renames", "--no-commit-id", commit)
        fields = raw.decode(errors="surrogateescape").split("\0")[:-1]
        # ":100644 100755 hash hash M", then the path.
        return [
            path
            for entry, path in zip(fields[::2], fields[1::2], strict=True)
            if all(mode in ("000000", "100644", "100755") for mode in entry.lstrip(":").split()[:2])
        ]

    def read_files(self, commit: str, paths: list[str]) -> dict[str, bytes | None]:
        """The content of each path in a commit; None where the commit lacks it."""
        raw = self.output("--literal-pathspecs", "ls-tree", "-r", "-z", commit, "--", *paths)
        contents: dict[str, bytes | None] = dict.fromkeys(paths)
        for entry in raw.decode(errors="surrogateescape").split("\0")[:-1]:
            head, path = entry.split("\t", 1)
            if path in contents:
                contents[path] = self.output("cat-file", "blob", head.split()[2])
        return contents
