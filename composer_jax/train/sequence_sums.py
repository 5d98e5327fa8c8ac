"""Sums over the documents of packed rows."""

import jax
import jax.numpy as jnp

from composer_jax.ops.shapes import check_shapes
from composer_jax.parallel import context
from composer_jax.parallel.sharding import axis_size


def sequence_sums(values_BS: jax.Array, segments_BS: jax.Array) -> jax.Array:
    """Returns for each position the sum of the values over its segment, float32 [B,S].

    A row that is divided over the mesh axis `context` is summed over all its parts.

    Args:
      values_BS: float32.
      segments_BS: int32, from 0 to the number of positions of the whole row.
    """
    check_shapes(values_BS=(values_BS, jnp.float32), segments_BS=(segments_BS, jnp.int32))
    parts = axis_size(context.AXIS)
    n_segments = parts * segments_BS.shape[1] + 1
    sums_BN = jax.vmap(lambda v, s: jnp.zeros_like(v, shape=n_segments).at[s].add(v))(values_BS, segments_BS)
    if parts > 1:
        sums_BN = jax.lax.psum(sums_BN, context.AXIS)
    return jnp.take_along_axis(sums_BN, segments_BS, axis=1)
