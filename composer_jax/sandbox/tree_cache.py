"""One pristine copy of a folder per pool, shared by all its workspaces and gradings."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from composer_jax.sandbox.async_lazy import AsyncLazy

MAX_TREES = 64  # per pool; the least recently used finished copy is dropped first, and deleted when nothing uses it

T = TypeVar("T")


class TreeCache(Generic[T]):
    """The trees of a pool by folder. make: SandboxPool.tree."""

    def __init__(self, make: Callable[[Path], T]):
        self._make = make
        self._trees: OrderedDict[Path, AsyncLazy[T]] = OrderedDict()

    async def get(self, folder: Path | None) -> T | None:
        """Returns the tree of a folder that does not change; a thread copies it on first use. None for None.

        Raises UserError when `folder` is not a folder, or cannot be read.
        """
        if folder is None:
            return None
        folder = folder.resolve()
        if folder not in self._trees:
            if len(self._trees) >= MAX_TREES:
                oldest = next((old for old, tree in self._trees.items() if not tree.is_computing), None)
                if oldest is not None:
                    del self._trees[oldest]
            self._trees[folder] = AsyncLazy(lambda: self._make(folder))
        self._trees.move_to_end(folder)
        return await self._trees[folder].get()

    async def settled(self) -> None:
        """Waits until no folder is being copied, so that its owner may remove it. Raises no errors of copies."""
        for tree in list(self._trees.values()):
            await tree.settled()
