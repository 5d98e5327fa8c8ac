"""Changes of a workspace: those of a diff, which git applies, and those that make the files of a folder."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from composer_jax.errors import UserError
from composer_jax.git import GitError, run_git
from composer_jax.sandbox import GONE, Change
from composer_jax.tasks.patches.unified import header_paths


def changes_from_patch(folder: Path, patch: str, reverse: bool = False) -> dict[str, Change]:
    """What `patch` (a unified or git diff with a/ and b/) changes in `folder`, which stays as it is.

    reverse: what undoing the patch changes. Raises UserError with git's message where the patch does not apply.
    """
    data = patch.encode(errors="surrogateescape")
    if not data.strip():
        return {}
    with tempfile.TemporaryDirectory() as scratch:
        before, after = Path(scratch, "before"), Path(scratch, "after")
        before.mkdir()
        for path in header_paths(patch):
            _copy(folder, path, before)
        shutil.copytree(before, after, symlinks=True)
        arguments = ["apply", "--whitespace=nowarn", *(["--reverse"] if reverse else [])]
        try:
            run_git(*arguments, cwd=after, stdin=data if data.endswith(b"\n") else data + b"\n")
        except GitError as error:
            raise UserError(f"the patch does not fit {folder}: {str(error).splitlines()[0]}") from None
        old, new = read_folder(before), read_folder(after)
        changes = {path: change for path, change in new.items() if old.get(path) != change}
        return changes | {path: GONE for path in old.keys() - new.keys()}


def apply_change(folder: Path, path: str, change: Change) -> None:
    """Writes one change to a folder of the host. Raises UserError for a path that leads out of it."""
    target = _clear_way(folder, path)
    if change.kind == "folder" and target.is_dir() and not target.is_symlink():
        return
    if target.is_symlink() or target.is_file():
        target.unlink()
    elif target.is_dir():
        shutil.rmtree(target)
    if change.kind == "gone":
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if change.kind == "folder":
        target.mkdir()
    elif change.kind == "link":
        os.symlink(change.data, os.fsencode(target))
    else:
        target.write_bytes(change.data)
        target.chmod(change.mode & 0o777 | 0o600)


def _copy(folder: Path, path: str, into: Path) -> None:
    """Copies what is at a path of a folder, if anything is."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
        return
    source, target = folder / pure, into / pure
    if any(parent.is_symlink() for parent in (folder / parent for parent in pure.parents)) or os.path.lexists(target):
        return
    if source.is_symlink() or source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
    elif source.is_dir():
        shutil.copytree(source, target, symlinks=True)


def _clear_way(folder: Path, path: str) -> Path:
    """The host path of `path`, after removing files that stand where its parent folders must be."""
    pure = PurePosixPath(path)
    parents = [folder / parent for parent in pure.parents][:-1]
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or any(parent.is_symlink() for parent in parents):
        raise UserError(f"the path {path!r} leads out of the workspace; use a relative path without ..")
    for parent in parents:
        if parent.is_file():
            parent.unlink()
    return folder / pure


def read_folder(folder: Path | None, is_wanted: Callable[[str], bool] = lambda path: True) -> dict[str, Change]:
    """Returns the files and links below a folder, of wanted relative paths, as changes that make them; {} for None."""
    changes = {}
    if folder is None:
        return changes
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not is_wanted(name):
            continue
        if path.is_symlink():
            changes[name] = Change("link", os.fsencode(path.readlink()), 0o777)
        elif path.is_file():
            changes[name] = Change("file", path.read_bytes(), path.stat().st_mode & 0o777)
    return changes
