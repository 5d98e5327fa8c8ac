"""One pristine copy of a folder per pool, however many workspaces and gradings stand on it."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from composer_jax.sandbox.async_lazy import AsyncLazy

MAX_TREES = 64  # per pool; the least recently used finished copy is dropped first, and deleted when nothing uses it

T = TypeVar("T")


class TreeCache(Generic[T]):
    """The trees of a pool by folder. make: LocalSandboxPool.tree, or what another pool has for it."""

    def __init__(self, make: Callable[[Path], T]):
        self._make = make
        self._trees: OrderedDict[Path, AsyncLazy[T]] = OrderedDict()

    async def get(self, folder: Path | None) -> T | None:
        """The tree of a folder that does not change, copied away from the event loop when first asked for.

        None of none. Raises UserError when the folder is none, or cannot be read.
        """
        if folder is None:
            return None
        folder = folder.resolve()
        if folder not in self._trees:
            if len(self._trees) >= MAX_TREES:
                oldest = next((old for old, tree in self._trees.items() if not tree.is_computing), None)
                self._trees.pop(oldest, None)
            self._trees[folder] = AsyncLazy(lambda: self._make(folder))
        self._trees.move_to_end(folder)
        return await self._trees[folder].get()

    async def settled(self) -> None:
        """Waits until no folder is being copied, so that whoever owns one may remove it. Who asked for the copies
        hears of their errors; here they are not told."""
        for tree in list(self._trees.values()):
            await tree.settled()
