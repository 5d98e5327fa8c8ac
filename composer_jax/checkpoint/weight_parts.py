"""Where the shards that a learner published overlap with the parts that a process of a sampler holds."""

import hashlib
from typing import NamedTuple

import numpy as np

from composer_jax.checkpoint.weight_patch import BLOCK, ElementChanges


class Box(NamedTuple):
    """A part of a whole array."""

    start: tuple[int, ...]
    """Its first element."""
    shape: tuple[int, ...]

    def contains(self, other: "Box") -> bool:
        """Whether every element of another box of the same array is in this one."""
        return overlap(self, other) == tuple(slice(0, n) for n in other.shape)


def overlap(here: Box, other: Box) -> tuple[slice, ...] | None:
    """Returns the elements of `other` that are also in `here`, as slices of `other`; None if there are none."""
    slices = []
    for start, size, other_start, other_size in zip(here.start, here.shape, other.start, other.shape, strict=True):
        low, high = max(start, other_start), min(start + size, other_start + other_size)
        if low >= high:
            return None
        slices.append(slice(low - other_start, high - other_start))
    return tuple(slices)


def changes_within(changes: ElementChanges, shard: Box, part: Box) -> ElementChanges:
    """Returns those changes of a published shard that are in a part, at their places in the part.

    The coordinates of at most BLOCK elements exist at once.
    """
    if shard == part or not len(changes.places):
        return changes
    places, bits = [], []
    for at in range(0, len(changes.places), BLOCK):
        indices = np.unravel_index(changes.places[at : at + BLOCK], shard.shape)
        moved = [i + a - b for i, a, b in zip(indices, shard.start, part.start, strict=True)]
        inside = np.logical_and.reduce([(i >= 0) & (i < n) for i, n in zip(moved, part.shape, strict=True)])
        places.append(np.ravel_multi_index([i[inside] for i in moved], part.shape).astype(np.int64))
        bits.append(changes.bits[at : at + BLOCK][inside])
    return ElementChanges(np.concatenate(places), np.concatenate(bits))


def bytes_digest(data: bytes) -> str:
    """Returns the SHA-256 of some bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()
