"""Copies of tokens into the order of their experts, and back: two linear maps that are each other's transpose.

    spread(x)[n]  = x[order[n] // k]           T tokens -> N = T k rows, sorted
    collect(y)[t] = sum_j y[places[t,j]]       N rows -> T tokens

`order` is a permutation of the N (token, choice) pairs and `places` [T,k] its inverse. Both directions of both are
gathers; left to differentiation, each would have a scatter for its transpose, which is slow everywhere.
"""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def spread(x_TD: jax.Array, order_N: jax.Array, places_Tk: jax.Array) -> jax.Array:
    """The token of every pair, [N,D], in sorted order."""
    return x_TD[order_N // places_Tk.shape[1]]


@jax.custom_vjp
def collect(y_ND: jax.Array, order_N: jax.Array, places_Tk: jax.Array) -> jax.Array:
    """The sum over the choices of every token, [T,D]; added up in float32."""
    return y_ND[places_Tk].sum(1, dtype=jnp.float32).astype(y_ND.dtype)


def _remember(function):
    return lambda array, order_N, places_Tk: (function(array, order_N, places_Tk), (order_N, places_Tk))


spread.defvjp(_remember(spread), lambda pairs, dx_ND: (collect(dx_ND, *pairs), None, None))
collect.defvjp(_remember(collect), lambda pairs, dy_TD: (spread(dy_TD, *pairs), None, None))
