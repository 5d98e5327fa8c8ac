"""The pristine folders of tasks as trees of a sandbox pool: copied once, kept while they are in use."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from pathlib import Path

from composer_jax.sandbox import SandboxPool, Tree

KEPT = 64  # folders per pool; the least recently used goes first

_trees: weakref.WeakKeyDictionary[SandboxPool, OrderedDict[Path, Tree]] = weakref.WeakKeyDictionary()


def tree_of(pool: SandboxPool, folder: Path | None) -> Tree | None:
    """The tree of a folder that does not change, or None of none. Raises UserError where it is no folder."""
    if folder is None:
        return None
    trees = _trees.setdefault(pool, OrderedDict())
    folder = folder.resolve()
    if folder not in trees:
        trees[folder] = pool.tree(folder)
        if len(trees) > KEPT:
            trees.popitem(last=False)
    trees.move_to_end(folder)
    return trees[folder]
