"""Rows of a table, with a gradient that is added up in float32.

Differentiated as it stands, table[ids] adds the gradients of all who asked for a row in the table's own dtype. In
bfloat16 a sum that has reached 256 takes no more ones: thousands of tokens that share a row would count as hundreds.
"""

import jax
import jax.numpy as jnp

from composer_jax.ops.vma import match_vma


def lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
    """table[ids]: rows [...,D] of a table [W,D], for integers [...] within it."""
    return _lookup(*match_vma(table, ids))


@jax.custom_vjp
def _lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
    return table[ids]


def _backward(saved: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None]:
    table, ids = saved
    total = jnp.zeros_like(table, jnp.float32).at[ids].add(gradient.astype(jnp.float32))
    return total.astype(table.dtype), None


_lookup.defvjp(lambda table, ids: (table[ids], (table, ids)), _backward)
