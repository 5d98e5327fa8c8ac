"""Reorder tokens by expert and back: linear maps, each with its transpose as gradient.

    permute_tokens(x)[n]   = x[order[n] // k]              T tokens -> N = T k rows, sorted
    unpermute_tokens(y)[t] = sum_j y[inverse[t,j]]         N rows -> T tokens

`order` is a permutation of the N (token, choice) pairs and `inverse` [T,k] its inverse. tokens_to_slots and
slots_to_tokens do the same with M slots, where slots may be empty and pairs may have no slot. All four are gathers in
both directions; automatic differentiation would make the transposes scatters, which are slow on every platform.
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from composer_jax.ops.shapes import check_shapes


@jax.custom_vjp
def permute_tokens(x_TD: jax.Array, order_N: jax.Array, inverse_Tk: jax.Array) -> jax.Array:
    """Returns the token of every pair in sorted order, [N,D]."""
    check_shapes(x_TD=(x_TD, None), order_N=(order_N, jnp.integer), inverse_Tk=(inverse_Tk, jnp.integer))
    chex.assert_equal_size([order_N, inverse_Tk])
    return x_TD[order_N // inverse_Tk.shape[1]]


@jax.custom_vjp
def unpermute_tokens(y_ND: jax.Array, order_N: jax.Array, inverse_Tk: jax.Array) -> jax.Array:
    """Returns the sum over the k rows of every token, [T,D], accumulated in float32."""
    check_shapes(y_ND=(y_ND, None), order_N=(order_N, jnp.integer), inverse_Tk=(inverse_Tk, jnp.integer))
    chex.assert_equal_size([order_N, inverse_Tk])
    return y_ND[inverse_Tk].sum(1, dtype=jnp.float32).astype(y_ND.dtype)


@jax.custom_vjp
def tokens_to_slots(x_TD: jax.Array, pairs_M: jax.Array, slots_Tk: jax.Array) -> jax.Array:
    """Returns the token in every slot, [M,D], and zeros in empty slots.

    Args:
      x_TD: tokens.
      pairs_M: the pair t k + j in each slot; N in an empty slot.
      slots_Tk: the slot of each pair; M for a pair without one.
    """
    check_shapes(x_TD=(x_TD, None), pairs_M=(pairs_M, jnp.integer), slots_Tk=(slots_Tk, jnp.integer))
    return jnp.take(x_TD, pairs_M // slots_Tk.shape[1], axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def slots_to_tokens(y_MD: jax.Array, pairs_M: jax.Array, slots_Tk: jax.Array) -> jax.Array:
    """Returns the sum over those pairs of every token that have a slot, [T,D], accumulated in float32."""
    check_shapes(y_MD=(y_MD, None), pairs_M=(pairs_M, jnp.integer), slots_Tk=(slots_Tk, jnp.integer))
    y_TkD = jnp.take(y_MD, slots_Tk, axis=0, mode="fill", fill_value=0)
    return y_TkD.sum(1, dtype=jnp.float32).astype(y_MD.dtype)


def _define_transposes(one: Any, other: Any) -> None:
    """Makes each function the gradient of the other."""

    def save_indices(function: Callable[..., jax.Array]):
        return lambda array, *indices: (function(array, *indices), indices)

    def transpose(function: Callable[..., jax.Array]):
        return lambda indices, d: (function(d, *indices), None, None)

    one.defvjp(save_indices(one), transpose(other))
    other.defvjp(save_indices(other), transpose(one))


_define_transposes(permute_tokens, unpermute_tokens)
_define_transposes(tokens_to_slots, slots_to_tokens)
