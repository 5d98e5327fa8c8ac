"""A batch of the host: a dict of fields [B,S,...], which lie in memory or are made when a block of them is read.

A block is what a device holds. Routes are 30 times as large as all other fields of a batch, so no process has all of
them as one array; one that gets its rows from another process has no other rows.
"""

from typing import Protocol

import numpy as np

Block = tuple[slice, ...]
"""Rows of a field and, where the mesh axis `context` divides it, positions in the order of the devices."""


class BlockSource(Protocol):
    """A field of a batch that does not lie in memory as a whole."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def read(self, block: Block, order: np.ndarray | None) -> np.ndarray:
        """Returns a block; order: the positions of the row in the order of the devices, if that is another one."""
        ...


HostField = np.ndarray | BlockSource
"""A field of a batch of the host."""
