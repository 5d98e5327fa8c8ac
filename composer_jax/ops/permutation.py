"""Copies of tokens into the order of their experts, and back: linear maps, each with its transpose.

    permute_tokens(x)[n]  = x[order[n] // k]           T tokens -> N = T k rows, sorted
    unpermute_tokens(y)[t] = sum_j y[places[t,j]]       N rows -> T tokens

`order` is a permutation of the N (token, choice) pairs and `places` [T,k] its inverse. tokens_to_slots and slots_to_tokens are the
same where pairs go to M slots that need not all be taken, and not every pair need have one. Both directions of all
four are gathers; left to differentiation, each would have a scatter for its transpose, which is slow everywhere.
"""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def permute_tokens(x_TD: jax.Array, order_N: jax.Array, places_Tk: jax.Array) -> jax.Array:
    """The token of every pair, [N,D], in sorted order."""
    return x_TD[order_N // places_Tk.shape[1]]


@jax.custom_vjp
def unpermute_tokens(y_ND: jax.Array, order_N: jax.Array, places_Tk: jax.Array) -> jax.Array:
    """The sum over the choices of every token, [T,D]; added up in float32."""
    return y_ND[places_Tk].sum(1, dtype=jnp.float32).astype(y_ND.dtype)


@jax.custom_vjp
def tokens_to_slots(x_TD: jax.Array, pairs_M: jax.Array, places_Tk: jax.Array) -> jax.Array:
    """The token in every slot, [M,D]; zero where it is empty.

    Args:
      x_TD: tokens.
      pairs_M: the pair in each slot, counted t k + j; N where there is none.
      places_Tk: the slot of each pair; M where it has none.
    """
    return jnp.take(x_TD, pairs_M // places_Tk.shape[1], axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def slots_to_tokens(y_MD: jax.Array, pairs_M: jax.Array, places_Tk: jax.Array) -> jax.Array:
    """The sum over those choices of every token that have a slot, [T,D]; added up in float32."""
    y_TkD = jnp.take(y_MD, places_Tk, axis=0, mode="fill", fill_value=0)
    return y_TkD.sum(1, dtype=jnp.float32).astype(y_MD.dtype)


def _transposes(one, other) -> None:
    """Makes each the gradient of the other."""
    remember = lambda function: lambda array, *indices: (function(array, *indices), indices)  # noqa: E731
    transposed = lambda function: lambda indices, d: (function(d, *indices), None, None)  # noqa: E731
    one.defvjp(remember(one), transposed(other))
    other.defvjp(remember(other), transposed(one))


_transposes(permute_tokens, unpermute_tokens)
_transposes(tokens_to_slots, slots_to_tokens)
