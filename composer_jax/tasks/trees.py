"""The pristine folders of tasks as trees of a sandbox pool, kept for the next grading."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from pathlib import Path

from composer_jax.sandbox import SandboxPool, Tree
from composer_jax.sandbox.shared_tree import SharedTree, shared_tree

KEPT = 64  # folders per pool; the least recently used goes first

_kept: weakref.WeakKeyDictionary[SandboxPool, OrderedDict[Path, SharedTree]] = weakref.WeakKeyDictionary()


async def tree_of(pool: SandboxPool, folder: Path | None) -> Tree | None:
    """The tree of a folder that does not change, shared with workspaces on it, or None of none.

    Raises UserError where it is no folder.
    """
    if folder is None:
        return None
    kept = _kept.setdefault(pool, OrderedDict())
    kept[folder] = shared_tree(pool, folder)
    kept.move_to_end(folder)
    if len(kept) > KEPT:
        kept.popitem(last=False)
    return await kept[folder].get()
