"""Rows of a table, with a gradient that is summed in float32.

JAX's own gradient of table[ids] sums over all uses of a row in the table's dtype. In bfloat16 a sum of ones stops at
256, so that thousands of tokens that share a row would count as hundreds.
"""

import chex
import jax
import jax.numpy as jnp

from composer_jax.ops.vma import match_vma


def lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns table[ids]: rows [...,D] of a floating table [W,D], for integer ids [...] within it."""
    chex.assert_rank(table, 2)
    chex.assert_type([table, ids], [jnp.floating, jnp.integer])
    return _lookup(*match_vma(table, ids))


@jax.custom_vjp
def _lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
    return table[ids]


def _backward(saved: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None]:
    table, ids = saved
    total = jnp.zeros_like(table, jnp.float32).at[ids].add(gradient.astype(jnp.float32))
    return total.astype(table.dtype), None


_lookup.defvjp(lambda table, ids: (table[ids], (table, ids)), _backward)
