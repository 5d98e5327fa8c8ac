"""What is mounted in a sandbox when it is made."""

from dataclasses import dataclass
from typing import Any

from composer_jax.sandbox.tree import Tree


@dataclass(frozen=True)
class MountPlan:
    """What a new sandbox gets.

    tree: what its workspace holds at first. packages, tests: trees of folders that are mounted read-only. network:
    whether it shares the network of the host.
    """

    tree: Tree
    packages: Tree | None = None
    tests: Tree | None = None
    network: bool = False

    def to_json(self) -> dict[str, Any]:
        """The plan as the zygote reads it."""
        return {
            "base": self.tree.base,
            "layers": self.tree.layers,
            "packages": self.packages and self.packages.base,
            "tests": self.tests and self.tests.base,
            "network": self.network,
        }

    @property
    def trees(self) -> list[Tree]:
        """Every tree of the plan."""
        return [tree for tree in (self.tree, self.packages, self.tests) if tree is not None]


EMPTY_PLAN: dict[str, Any] = {"base": None, "layers": [], "packages": None, "tests": None, "network": False}
"""MountPlan.to_json of a sandbox with an empty workspace and nothing else."""
