"""Expert dispatch: tokens to experts and back. One contract,

    dispatch(x[T,D], ids[T,k], gates[T,k], experts) -> y[T,D] = sum_j gates[t,j] * expert_{ids[t,j]}(x[t])

`experts` holds gate, up [E',D,F] and down [E',F,D], where E' are the experts of this device's group.
Inside the per-device program the `expert` mesh axis spreads both tokens and experts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.ops.grouped_matmul import grouped_matmul
from composer_jax.ops.permutation import collect, spread
from composer_jax.parallel.sharding import axis_size


class Experts(NamedTuple):
    gate_EDF: jax.Array
    up_EDF: jax.Array
    down_EFD: jax.Array


def gates_by_expert(ids_Tk: jax.Array, gates_Tk: jax.Array, n: int) -> jax.Array:
    """Gate of every token for every expert, [T,n]; zero where the expert was not chosen."""
    return (jax.nn.one_hot(ids_Tk, n, dtype=gates_Tk.dtype) * gates_Tk[..., None]).sum(-2)


def compute_all(x_TD: jax.Array, gates_TE: jax.Array, experts: Experts) -> jax.Array:
    """Every expert for every token as three large matrix products; unchosen experts have gate zero.

    E/k times the useful arithmetic, which is the cheapest form for the handful of tiny experts that run on a CPU.
    """
    e, d, f = experts.gate_EDF.shape
    side_by_side = lambda w_EDF: w_EDF.transpose(1, 0, 2).reshape(d, e * f)  # noqa: E731
    hidden = jax.nn.silu(x_TD @ side_by_side(experts.gate_EDF)) * (x_TD @ side_by_side(experts.up_EDF))
    gates = jnp.repeat(gates_TE.astype(x_TD.dtype), f, axis=1)
    return (hidden * gates) @ experts.down_EFD.reshape(e * f, d)


def compute_chosen(x_TD: jax.Array, ids_Tk: jax.Array, gates_Tk: jax.Array, experts: Experts) -> jax.Array:
    """The chosen experts for every token: sort by expert, grouped products, back in place, weighted sum.

    ids_Tk count from the first expert here; those outside 0 .. E'-1 belong to other devices and add nothing.
    """
    n, (t, k) = experts.gate_EDF.shape[0], ids_Tk.shape
    ids_N = jnp.where((ids_Tk >= 0) & (ids_Tk < n), ids_Tk, n).reshape(-1)
    sizes_E = jnp.bincount(ids_N, length=n).astype(jnp.int32)
    order_N = jnp.argsort(ids_N)
    places_Tk = jnp.argsort(order_N).reshape(t, k)
    x_ND = spread(x_TD, order_N, places_Tk)
    gate, up = (grouped_matmul(x_ND, w, sizes_E) for w in (experts.gate_EDF, experts.up_EDF))
    y_ND = grouped_matmul(jax.nn.silu(gate) * up, experts.down_EFD, sizes_E)
    gates_N = gates_Tk.reshape(-1)[order_N]
    return collect(y_ND * gates_N[:, None], order_N, places_Tk)


def dense(x_TD: jax.Array, ids_Tk: jax.Array, gates_Tk: jax.Array, experts: Experts) -> jax.Array:
    """The oracle: each device gathers all experts and computes its own tokens."""
    if axis_size("expert") > 1:
        experts = Experts(*(jax.lax.all_gather(w, "expert", axis=0, tiled=True) for w in experts))
    return compute_all(x_TD, gates_by_expert(ids_Tk, gates_Tk, experts.gate_EDF.shape[0]), experts)


def ring(x_TD: jax.Array, ids_Tk: jax.Array, gates_Tk: jax.Array, experts: Experts) -> jax.Array:
    """All-gathers the tokens of the expert group, computes the own experts, reduce-scatters. Never drops a token."""
    if axis_size("expert") == 1:
        return compute_chosen(x_TD, ids_Tk, gates_Tk, experts)
    x_TD, ids_Tk, gates_Tk = (jax.lax.all_gather(a, "expert", axis=0, tiled=True) for a in (x_TD, ids_Tk, gates_Tk))
    first = jax.lax.axis_index("expert") * experts.gate_EDF.shape[0]
    y_TD = compute_chosen(x_TD, ids_Tk - first, gates_Tk, experts)
    return jax.lax.psum_scatter(y_TD, "expert", scatter_dimension=0, tiled=True)


DISPATCH = {"dense": dense, "ring": ring}
