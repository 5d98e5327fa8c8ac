"""A function of many positions, computed chunk by chunk, so that its intermediate values exist for one chunk only."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp


def map_chunks(function: Callable[..., Any], size: int | None, *arrays: jax.Array) -> Any:
    """Returns function(*arrays), computed for `size` positions at a time.

    The backward pass recomputes each chunk. The last chunk is padded with zeros.

    Args:
      function: from arrays [T,...] to a pytree of arrays [T,...], one position at a time.
      size: positions in a chunk; None, or no more than `size` positions: one call without chunks.
      arrays: [T,...], equal in T.
    """
    chex.assert_equal_shape_prefix(arrays, 1)
    count = len(arrays[0])
    if size is None or count <= size:
        return function(*arrays)
    chunks = -(-count // size)

    def split(array: jax.Array) -> jax.Array:
        padded = jnp.pad(array, ((0, chunks * size - count),) + ((0, 0),) * (array.ndim - 1))
        return padded.reshape(chunks, size, *array.shape[1:])

    parts = jax.lax.map(lambda inputs: jax.checkpoint(function)(*inputs), tuple(map(split, arrays)))
    return jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:])[:count], parts)
