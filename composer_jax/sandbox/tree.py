"""What a workspace can stand on: a pristine folder, and what frozen sandboxes changed in it."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer_jax.errors import UserError


class Tree:
    """A state of a workspace that never changes. Any number of sandboxes stand on it and share its files.

    Made by SandboxPool.tree (of a folder) and Sandbox.snapshot; belongs to that pool and ends with it. What a snapshot
    holds is given back when nothing refers to it any more.
    """

    def __init__(self, below: "Tree | None" = None, *, base: str | None = None, layer: str | None = None):
        self._below = below
        self._base = base if below is None else below._base
        self._layer = layer

    def describe(self) -> dict[str, Any]:
        """As the zygote wants it."""
        return {"base": self._base, "layers": [tree._layer for tree in self._chain() if tree._layer is not None]}

    @property
    def depth(self) -> int:
        """How many snapshots it is made of."""
        return sum(tree._layer is not None for tree in self._chain())

    def _chain(self) -> Iterator["Tree"]:
        if self._below is not None:
            yield from self._below._chain()
        yield self


def copy_tree(folder: Path, target: Path) -> None:
    """A copy of a folder for sandboxes: links stay links, what is neither file nor folder nor link is left out.

    Raises:
      UserError: it is no folder, or cannot be read.
    """

    def special(parent: str, names: list[str]) -> list[str]:
        paths = ((name, Path(parent, name)) for name in names)
        return [name for name, path in paths if not (path.is_symlink() or path.is_file() or path.is_dir())]

    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; a workspace stands on one.")
    try:
        shutil.copytree(folder, target, symlinks=True, ignore=special)
    except (OSError, shutil.Error) as error:
        raise UserError(f"{folder} cannot be copied for sandboxes: {error}") from error
    for path in (target, *target.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o777 | (0o755 if path.is_dir() else 0o644))
