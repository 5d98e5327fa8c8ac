"""git, without what is set for the person who runs it: no configuration, no hooks, no repository around the folder."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from composer_jax.errors import UserError

_SETTINGS = ("core.autocrlf=false", "core.hooksPath=/dev/null", "core.fsmonitor=false", "safe.directory=*")


class GitFailed(Exception):
    """git ended with an error: its message."""


def git(*words: str | Path, cwd: Path, stdin: bytes = b"", environment: Mapping[str, str] | None = None) -> bytes:
    """What git prints. Raises GitFailed for an exit code other than 0, UserError where there is no git."""
    variables = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": os.devnull,
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_CEILING_DIRECTORIES": str(cwd.resolve().parent),
        **(environment or {}),
    }
    settings = [word for setting in _SETTINGS for word in ("-c", setting)]
    try:
        done = subprocess.run(
            ["git", *settings, *map(str, words)], cwd=cwd, env=variables, input=stdin, capture_output=True, check=False
        )
    except FileNotFoundError:
        raise UserError("tasks of repositories need git, which is not installed; install it") from None
    if done.returncode:
        raise GitFailed(done.stderr.decode(errors="replace").strip())
    return done.stdout
