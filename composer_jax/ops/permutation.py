"""Reorder tokens by expert and back: linear maps, each with its transpose as gradient.

    permute_tokens(x)[n]   = x[order[n] // k]              T tokens -> N = T k rows, sorted
    unpermute_tokens(y)[t] = sum_j y[inverse[t,j]]         N rows -> T tokens

`order` is a permutation of the N (token, choice) pairs and `inverse` [T,k] its inverse. Both are gathers in both
directions; automatic differentiation would make the transposes scatters, which are slow on every platform.

With `valid`, bool [T,k], pairs that are not valid have rows, but these may hold any value, also NaN: neither
`unpermute_tokens` nor the gradient of `permute_tokens` reads them. XLA fuses this selection with the sum.
"""

import chex
import jax
import jax.numpy as jnp

from composer_jax.ops.shapes import check_shapes


@jax.custom_vjp
def permute_tokens(
    x_TD: jax.Array, order_N: jax.Array, inverse_Tk: jax.Array, valid_Tk: jax.Array | None = None
) -> jax.Array:
    """Returns the token of every pair in sorted order, [N,D]."""
    check_shapes(
        x_TD=(x_TD, None),
        order_N=(order_N, jnp.integer),
        inverse_Tk=(inverse_Tk, jnp.integer),
        valid_Tk=(valid_Tk, bool),
    )
    chex.assert_equal_size([order_N, inverse_Tk])
    return x_TD[order_N // inverse_Tk.shape[1]]


@jax.custom_vjp
def unpermute_tokens(
    y_ND: jax.Array, order_N: jax.Array, inverse_Tk: jax.Array, valid_Tk: jax.Array | None = None
) -> jax.Array:
    """Returns the sum over the k rows of every token, [T,D], accumulated in float32.

    The gradient of the row of a pair that is not valid is its token's, instead of zero.
    """
    check_shapes(
        y_ND=(y_ND, None),
        order_N=(order_N, jnp.integer),
        inverse_Tk=(inverse_Tk, jnp.integer),
        valid_Tk=(valid_Tk, bool),
    )
    chex.assert_equal_size([order_N, inverse_Tk])
    y_TkD = y_ND[inverse_Tk]
    if valid_Tk is not None:
        y_TkD = jnp.where(valid_Tk[:, :, None], y_TkD, 0)
    return y_TkD.sum(1, dtype=jnp.float32).astype(y_ND.dtype)


permute_tokens.defvjp(
    lambda x_TD, *indices: (permute_tokens(x_TD, *indices), indices),
    lambda indices, dy_ND: (unpermute_tokens(dy_ND, *indices), None, None, None),
)
unpermute_tokens.defvjp(
    lambda y_ND, *indices: (unpermute_tokens(y_ND, *indices), indices),
    lambda indices, dx_TD: (permute_tokens(dx_TD, *indices), None, None, None),
)
