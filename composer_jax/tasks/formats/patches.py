"""Diffs: what one makes of a folder, and the one that says what changed in it."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from composer_jax.errors import UserError
from composer_jax.sandbox import GONE, Change
from composer_jax.tasks.formats.git import GitFailed, git

_PATHS = re.compile(rb"^(?:---|\+\+\+|rename (?:from|to)|copy (?:from|to)) (.+?)\t?\r?$", re.MULTILINE)
_BOTH = re.compile(rb"^diff --git (.+)$", re.MULTILINE)
_ESCAPE = re.compile(rb'\\([abtnvfr"\\]|[0-7]{3})')
_ESCAPES = dict(zip(b'abtnvfr"\\', b'\a\b\t\n\v\f\r"\\', strict=True))


def changes_from_patch(folder: Path, patch: str, reverse: bool = False) -> dict[str, Change]:
    """What `patch` (a unified or git diff with a/ and b/) changes in `folder`, which stays as it is.

    reverse: what taking it back changes. Raises UserError, with git's words, where it does not apply.
    """
    data = patch.encode(errors="surrogateescape")
    if not data.strip():
        return {}
    with tempfile.TemporaryDirectory() as scratch:
        before, after = Path(scratch, "before"), Path(scratch, "after")
        before.mkdir()
        for path in _touched(data):
            _copy(folder, path, before)
        shutil.copytree(before, after, symlinks=True)
        try:
            git("apply", "--whitespace=nowarn", *(["--reverse"] if reverse else []), cwd=after, stdin=_ended(data))
        except GitFailed as error:
            raise UserError(f"the patch does not fit {folder}: {str(error).splitlines()[0]}") from None
        return _differences(before, after)


def patch_from_changes(folder: Path | None, changes: Mapping[str, Change]) -> str:
    """The git diff (a/, b/; binary files included) that makes of `folder` what `changes` makes of it.

    None: an empty folder. Empty folders and what is in a .git are no part of a diff.
    """
    with tempfile.TemporaryDirectory() as scratch:
        files = Path(scratch, "files")
        files.mkdir()
        where = {"GIT_DIR": str(Path(scratch, "git")), "GIT_WORK_TREE": str(files)}
        git("init", "--quiet", cwd=files, environment=where)
        Path(scratch, "git/info").mkdir(exist_ok=True)
        Path(scratch, "git/info/attributes").write_text("* -text -filter -ident !diff\n")
        for path in changes:
            if folder is not None:
                _copy(folder, path, files)
        trees = [_tree(files, where)]
        for path in sorted(changes):
            apply_change(files, path, changes[path])
        trees.append(_tree(files, where))
        options = ("-r", "-p", "--binary", "--no-renames", "--no-ext-diff", "--no-textconv")
        return git("diff-tree", *options, *trees, cwd=files, environment=where).decode(errors="surrogateescape")


def apply_change(folder: Path, path: str, change: Change) -> None:
    """Makes one change in a folder of the host. Raises UserError for a path that leads out of it."""
    target = _inside(folder, path)
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


def _tree(files: Path, where: Mapping[str, str]) -> str:
    git("add", "--all", "--force", ".", cwd=files, environment=where)
    return git("write-tree", cwd=files, environment=where).decode().strip()


def _touched(patch: bytes) -> Iterator[str]:
    """Every path that the headers name, and perhaps more: lines of a hunk can look like headers."""
    for match in _PATHS.finditer(patch):
        name = _unquoted(match[1])
        yield from {name, name.partition("/")[2]} - {"", "dev/null"}
    for match in _BOTH.finditer(patch):  # changes of a mode have no other header
        both = match[1]
        half = _unquoted(both[: len(both) // 2])  # "a/x b/x": the same path twice
        if name := half.partition("/")[2]:
            yield name


def _unquoted(name: bytes) -> str:
    """A file name as git writes it: in quotes, with escapes, where it is unusual."""
    if name.startswith(b'"') and name.endswith(b'"'):
        name = _ESCAPE.sub(lambda m: bytes([int(m[1], 8) % 256 if len(m[1]) == 3 else _ESCAPES[m[1][0]]]), name[1:-1])
    return os.fsdecode(name)


def _copy(folder: Path, path: str, into: Path) -> None:
    """Copies what is at a path of a folder, if there is something."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
        return
    source, target = folder / pure, into / pure
    if any(above.is_symlink() for above in (folder / parent for parent in pure.parents)) or os.path.lexists(target):
        return
    if source.is_symlink() or source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
    elif source.is_dir():
        shutil.copytree(source, target, symlinks=True)


def _inside(folder: Path, path: str) -> Path:
    pure = PurePosixPath(path)
    above = [folder / parent for parent in pure.parents][:-1]
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or any(parent.is_symlink() for parent in above):
        raise UserError(f"the path {path!r} leads out of the workspace; use a relative path without ..")
    for parent in above:
        if parent.is_file():
            parent.unlink()
    return folder / pure


def _ended(patch: bytes) -> bytes:
    return patch if patch.endswith(b"\n") else patch + b"\n"


def _differences(before: Path, after: Path) -> dict[str, Change]:
    old, new = (dict(_contents(folder)) for folder in (before, after))
    changes = {path: change for path, change in new.items() if old.get(path) != change}
    return changes | {path: GONE for path in old.keys() - new.keys()}


def _contents(folder: Path) -> Iterator[tuple[str, Change]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            yield name, Change("link", os.fsencode(os.readlink(path)), 0o777)
        elif path.is_file():
            yield name, Change("file", path.read_bytes(), path.stat().st_mode & 0o777)
