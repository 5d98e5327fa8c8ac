"""States of workspaces (a pristine folder, and on top of it the layers of frozen sandboxes), and what is mounted."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_jax.errors import UserError
from composer_jax.sandbox.inside import copies

if TYPE_CHECKING:
    from composer_jax.sandbox.local_pool import LocalSandboxPool
    from composer_jax.sandbox.spawner import Spawner

MAX_DEPTH = 200
"""Snapshots below one workspace. Their names must fit into one page of mount options."""


class Tree:
    """An immutable state of a workspace. Any number of sandboxes are mounted on it and share its files.

    Made by LocalSandboxPool.tree (from a folder) and LocalSandbox.snapshot. It belongs to that pool and ends with it.
    Its memory and disk are released when nothing refers to it any more.
    """

    def __init__(
        self,
        pool: "LocalSandboxPool",
        below: "Tree | None" = None,
        *,
        base: str | None = None,
        layer: tuple["Spawner", str] | None = None,
    ):
        self.pool = pool
        self._below = below
        self.base = base if below is None else below.base
        """Name of the copied folder below all snapshots; None: there is none."""
        self._layer = layer

    @property
    def layers(self) -> list[str]:
        """Names of the layers, the oldest first."""
        return [tree._layer[1] for tree in self._chain() if tree._layer is not None]

    def is_alive_in(self, spawner: "Spawner") -> bool:
        """Whether this spawner holds all its layers; one that has ended holds none."""
        return all(tree._layer is None or tree._layer[0] is spawner for tree in self._chain())

    def _chain(self) -> Iterator["Tree"]:
        if self._below is not None:
            yield from self._below._chain()
        yield self


@dataclass(frozen=True)
class MountPlan:
    """What a new sandbox gets.

    tree: what its workspace holds at first. packages, tests, solution: trees of folders that are mounted read-only.
    network: whether it shares the network of the host.
    """

    tree: Tree
    packages: Tree | None = None
    tests: Tree | None = None
    network: bool = False
    solution: Tree | None = None

    def to_json(self) -> dict[str, Any]:
        """The plan as the zygote reads it."""
        return {
            "base": self.tree.base,
            "layers": self.tree.layers,
            "packages": self.packages and self.packages.base,
            "tests": self.tests and self.tests.base,
            "network": self.network,
            "solution": self.solution and self.solution.base,
        }

    @property
    def trees(self) -> list[Tree]:
        """Every tree of the plan."""
        return [tree for tree in (self.tree, self.packages, self.tests, self.solution) if tree is not None]


EMPTY_PLAN: dict[str, Any] = {
    **dict.fromkeys(("base", "packages", "tests", "solution")),
    "layers": [],
    "network": False,
}
"""MountPlan.to_json of a sandbox with an empty workspace and nothing else."""


def copy_folder(folder: Path, target: Path) -> None:
    """Copies a folder for sandboxes: links stay links, pipes and sockets are left out.

    Raises UserError when `folder` is not a folder, or cannot be read.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; a workspace needs one.")
    try:
        target.mkdir()
        copies.copy_tree(str(folder), str(target))
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise UserError(f"{folder} cannot be copied for sandboxes: {error}") from error
    if os.geteuid() == 0:  # the sandbox that reads it is not root
        for path in (target, *target.rglob("*")):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & 0o777 | (0o755 if path.is_dir() else 0o644))
