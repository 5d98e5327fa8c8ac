"""Hooks in a user's repository that look at the tracked sessions after a commit, checkout, rewrite or merge.

A hook runs `launch.track check` in the background, so that git neither waits for it nor fails with it, and only where
sessions are tracked. What it printed last is in composer_jax/track/hook.log of the git directory.
"""

from __future__ import annotations

import os
import shlex
import stat
import sys
from pathlib import Path

from composer_jax.atomic_write import open_atomically
from composer_jax.errors import UserError
from composer_jax.git import GitError, run_git
from composer_jax.realtime.track.working_tree import user_settings

HOOKS = ("post-commit", "post-checkout", "post-rewrite", "post-merge")
_BEGIN, _END = "# composer_jax.track: begin", "# composer_jax.track: end"
_SHELLS = ("#!/bin/sh", "#!/bin/bash", "#!/usr/bin/env sh", "#!/usr/bin/env bash", "#!/usr/bin/sh", "#!/usr/bin/bash")


def install_hooks(root: Path) -> list[Path]:
    """Adds our lines to the hooks of a working tree and returns their files. Other lines of a hook stay.

    Raises UserError: the hooks lie elsewhere (core.hooksPath), or one is a link, disabled or no shell script.
    """
    _refuse_hooks_path(root)
    files = [_hooks_folder(root) / name for name in HOOKS]
    texts = [_without_ours(file) or "#!/bin/sh\n" for file in files]
    for file, text in zip(files, texts, strict=True):
        _refuse_link(file)
        if file.exists() and not os.access(file, os.X_OK):
            raise UserError(f"{file} is not executable, so git ignores it; delete it, or make it executable")
        if text.splitlines()[0].strip() not in _SHELLS:
            raise UserError(f"{file} is not a shell script; call this from it instead: {_command()}")
    for file, text in zip(files, texts, strict=True):
        first, _, rest = text.partition("\n")  # before the other lines, which may end with exit or exec
        _write(file, "\n".join((first, _BEGIN, _command(), _END, rest)))
    return files


def remove_hooks(root: Path) -> list[Path]:
    """Takes our lines out of the hooks of a working tree and returns the files that had them."""
    changed = []
    for name in HOOKS:
        file = _hooks_folder(root) / name
        if file.exists() and _BEGIN in file.read_text(errors="surrogateescape"):
            _refuse_link(file)
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
    # With -P, no module of the repository is imported.
    python = f"PYTHONPATH={shlex.quote(str(library))} {shlex.quote(sys.executable)} -P -m launch.track"
    git_folder = '"$(git rev-parse --git-dir)"'
    folder = f"{git_folder}/composer_jax/track"
    # A rebase, and a cherry-pick or revert of several commits, commits many times; post-rewrite ends a rebase.
    series = " && ".join(f"test ! -d {git_folder}/{name}" for name in ("rebase-merge", "rebase-apply", "sequencer"))
    is_quiet = f'test "${{0##*/}}" = post-rewrite || {{ {series}; }}'
    check = f"({python} --repository=. check < /dev/null > {folder}/hook.log 2>&1 &)"
    return f"if test -d {folder}/sessions && {{ {is_quiet}; }}; then {check} fi"


def _refuse_hooks_path(root: Path) -> None:
    home = {"HOME": str(Path.home())}
    for scope in (("--local",), *(("--file", str(file), "--includes") for file in user_settings())):
        try:
            where = run_git("config", *scope, "--get", "core.hooksPath", cwd=root, environment=home)
        except GitError:  # it is not set there
            continue
        raise UserError(
            f"the hooks of {root} lie in core.hooksPath={os.fsdecode(where).strip()}; add this line to the hooks "
            f"{', '.join(HOOKS)} there: {_command()}"
        )


def _refuse_link(file: Path) -> None:
    """Raises UserError for a hook, or a folder of hooks, that is a link and so may be a file of the working tree."""
    for path in (file, file.parent):
        if path.is_symlink():
            raise UserError(f"{path} is a link to {path.readlink()}; change it by hand: {_command()}")


def _hooks_folder(root: Path) -> Path:
    common = run_git("rev-parse", "--git-common-dir", cwd=root).removesuffix(b"\n")
    return root / os.fsdecode(common) / "hooks"


def _without_ours(file: Path) -> str:
    if not file.exists():
        return ""
    before, begin, ours = file.read_text(errors="surrogateescape").partition(f"{_BEGIN}\n")
    return before + ours.partition(f"{_END}\n")[2] if begin else before


def _write(file: Path, text: str) -> None:
    mode = stat.S_IMODE(file.stat().st_mode) if file.exists() else 0o755
    with open_atomically(file) as stream:
        os.fchmod(stream.fileno(), mode)
        stream.write(text.encode(errors="surrogateescape"))
