"""A function of many positions, a chunk of them at a time, so that what it makes inside exists for one chunk only."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def map_chunks(function: Callable, size: int | None, *arrays):
    """function(*arrays), whose arrays and results share their leading axis T, computed for `size` positions at a time.

    The inside of a chunk is computed again in the backward pass. The last chunk is filled up with zeros. With
    size=None, or no more than `size` positions, it is just the function.
    """
    count = len(arrays[0])
    if size is None or count <= size:
        return function(*arrays)
    chunks = -(-count // size)

    def cut(array):
        padded = jnp.pad(array, ((0, chunks * size - count),) + ((0, 0),) * (array.ndim - 1))
        return padded.reshape(chunks, size, *array.shape[1:])

    parts = jax.lax.map(lambda inputs: jax.checkpoint(function)(*inputs), tuple(map(cut, arrays)))
    return jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:])[:count], parts)
