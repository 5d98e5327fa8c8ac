"""One pristine copy of a folder per pool, however many workspaces stand on it at the same time."""

import weakref
from pathlib import Path

from composer_jax.sandbox.made_once import MadeOnce
from composer_jax.sandbox.pool import SandboxPool
from composer_jax.sandbox.tree import Tree

_SHARED: "weakref.WeakKeyDictionary[SandboxPool, weakref.WeakValueDictionary[Path, SharedTree]]"
_SHARED = weakref.WeakKeyDictionary()


class SharedTree:
    """The tree of a folder, copied when it is first asked for; given back when nobody holds this any more."""

    def __init__(self, pool: SandboxPool, folder: Path):
        self._tree = MadeOnce(lambda: pool.tree(folder))

    async def get(self) -> Tree:
        """The tree. Raises UserError when the folder is none, or cannot be read."""
        return await self._tree.get()


def shared_tree(pool: SandboxPool, folder: Path) -> SharedTree:
    """The same object for the same pool and folder as long as somebody holds it."""
    folder = folder.resolve()
    of_pool = _SHARED.setdefault(pool, weakref.WeakValueDictionary())
    shared = of_pool.get(folder)
    if shared is None:
        shared = of_pool[folder] = SharedTree(pool, folder)
    return shared
