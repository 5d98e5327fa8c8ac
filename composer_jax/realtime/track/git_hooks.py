"""Hooks in a user's repository that look at the tracked sessions after a commit, checkout, rewrite or merge.

A hook runs `launch.track check` in the background, so that git neither waits for it nor fails with it, and only where
sessions are tracked. What it printed last is in composer_jax/track/hook.log of the git directory.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.git import GitError, run_git

HOOKS = ("post-commit", "post-checkout", "post-rewrite", "post-merge")
_BEGIN, _END = "# composer_jax.track: begin", "# composer_jax.track: end"
_SHELLS = ("#!/bin/sh", "#!/bin/bash", "#!/usr/bin/env sh", "#!/usr/bin/env bash", "#!/usr/bin/sh", "#!/usr/bin/bash")


def install_hooks(root: Path) -> list[Path]:
    """Adds our lines to the hooks of a working tree and returns their files. Other lines of a hook stay.

    Raises UserError: the hooks lie elsewhere (core.hooksPath), or one is no shell script.
    """
    files = [_hooks_folder(root) / name for name in HOOKS]
    texts = [_without_ours(file) or "#!/bin/sh\n" for file in files]
    for file, text in zip(files, texts, strict=True):
        if text.splitlines()[0].strip() not in _SHELLS:
            raise UserError(f"{file} is no shell script; call this from it instead: {_command()}")
    for file, text in zip(files, texts, strict=True):
        first, rest = text.split("\n", 1)  # before the other lines, which may end with exit or exec
        _write(file, "\n".join((first, _BEGIN, _command(), _END, rest)))
    return files


def remove_hooks(root: Path) -> list[Path]:
    """Takes our lines out of the hooks of a working tree and returns the files that had them."""
    changed = []
    for name in HOOKS:
        file = _hooks_folder(root) / name
        if file.exists() and _BEGIN in file.read_text(errors="surrogateescape"):
            text = _without_ours(file)
            if text.strip() == "#!/bin/sh":
                file.unlink()
            else:
                _write(file, text)
            changed.append(file)
    return changed


def _command() -> str:
    """A line for a shell script that runs in the top folder of a working tree."""
    library = Path(__file__).resolve().parents[3]
    python = f"PYTHONPATH={shlex.quote(str(library))} {shlex.quote(sys.executable)} -m launch.track"
    git_folder = '"$(git rev-parse --git-dir)"'
    folder = f"{git_folder}/composer_jax/track"
    # A rebase commits many times; post-rewrite ends it.
    is_quiet = f'test "${{0##*/}}" = post-rewrite || test ! -d {git_folder}/rebase-merge'
    check = f"({python} --repository=. check < /dev/null > {folder}/hook.log 2>&1 &)"
    return f"if test -d {folder}/sessions && {{ {is_quiet}; }}; then {check} fi"


def _hooks_folder(root: Path) -> Path:
    settings = Path("~/.gitconfig").expanduser()
    own = {"GIT_CONFIG_GLOBAL": str(settings)} if settings.exists() else {}
    for scope in ("--local", "--global"):
        try:
            where = run_git("config", scope, "--get", "core.hooksPath", cwd=root, environment=own)
        except GitError:  # it is not set there
            continue
        raise UserError(
            f"the hooks of {root} lie in core.hooksPath={os.fsdecode(where).strip()}; add this line to the hooks "
            f"{', '.join(HOOKS)} there: {_command()}"
        )
    common = run_git("rev-parse", "--git-common-dir", cwd=root).removesuffix(b"\n")
    return root / os.fsdecode(common) / "hooks"


def _without_ours(file: Path) -> str:
    if not file.exists():
        return ""
    before, begin, ours = file.read_text(errors="surrogateescape").partition(f"{_BEGIN}\n")
    return before + ours.partition(f"{_END}\n")[2] if begin else before


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, errors="surrogateescape")
        file.chmod(0o755)
    except OSError as error:
        raise UserError(
            f"cannot write {file} ({error.strerror}); let it be written, or add the hook by hand"
        ) from error
