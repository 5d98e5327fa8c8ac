"""A function of many positions, computed chunk by chunk, so that its intermediate values exist for one chunk only."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp


def map_chunks(function: Callable[..., Any], size: int | None, weights: Any, *arrays: jax.Array) -> Any:
    """Returns function(weights, *arrays), computed for `size` positions at a time.

    The backward pass recomputes each chunk and sums the gradients of the weights over chunks in float32. The last chunk
    is padded with zeros.

    Args:
      function: from the weights and arrays [T,...] to a pytree of arrays [T,...], one position at a time. A weight that
        it has from elsewhere gets a gradient that is summed in the weight's dtype.
      size: positions in a chunk; None, or no more than `size` positions: one call without chunks.
      weights: pytree of floating arrays of any shape, whole in every chunk.
      arrays: [T,...], equal in T.
    """
    chex.assert_equal_shape_prefix(arrays, 1)
    count = len(arrays[0])
    if size is None or count <= size:
        return function(weights, *arrays)
    chunks = -(-count // size)

    def split(array: jax.Array) -> jax.Array:
        padded = jnp.pad(array, ((0, chunks * size - count),) + ((0, 0),) * (array.ndim - 1))
        return padded.reshape(chunks, size, *array.shape[1:])

    wide = jax.tree.map(lambda weight: weight.astype(jnp.float32), weights)

    @jax.checkpoint
    def compute(wide, weights, inputs):
        return function(jax.tree.map(_with_gradient_of, wide, weights), *inputs)

    parts = jax.lax.map(lambda inputs: compute(wide, weights, inputs), tuple(map(split, arrays)))
    return jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:])[:count], parts)


@jax.custom_vjp
def _with_gradient_of(wide: jax.Array, narrow: jax.Array) -> jax.Array:
    """Returns `narrow`, whose gradient goes to `wide`: a float32 view of it that is never read, so that no program
    computes it."""
    return narrow


_with_gradient_of.defvjp(lambda wide, narrow: (narrow, None), lambda _, gradient: (gradient.astype(jnp.float32), None))
