"""Expert dispatch: tokens to experts and back. One contract,

    dispatch(x[T,D], ids[T,k], gates[T,k], experts, activation) -> y[T,D] = sum_j gates[t,j] * expert_{ids[t,j]}(x[t])

`experts` holds gate, up [E',D,F] and down [E',F,D], where E' are the experts of this device's group, and their biases
if they have any: expert(x) = activation(x gate + b_gate, x up + b_up) down + b_down.
Inside the per-device program the `expert` mesh axis spreads both tokens and experts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.ops.activation import Activation, swiglu
from composer_jax.ops.grouped_matmul import grouped_matmul
from composer_jax.ops.lookup import lookup
from composer_jax.ops.permutation import collect, spread
from composer_jax.parallel.sharding import axis_size


class Biases(NamedTuple):
    gate_EF: jax.Array
    up_EF: jax.Array
    down_ED: jax.Array


class Experts(NamedTuple):
    gate_EDF: jax.Array
    up_EDF: jax.Array
    down_EFD: jax.Array
    biases: Biases | None = None


def gates_by_expert(ids_Tk: jax.Array, gates_Tk: jax.Array, n: int) -> jax.Array:
    """Gate of every token for every expert, [T,n]; zero where the expert was not chosen."""
    return (jax.nn.one_hot(ids_Tk, n, dtype=gates_Tk.dtype) * gates_Tk[..., None]).sum(-2)


def compute_all(x_TD: jax.Array, gates_TE: jax.Array, experts: Experts, activation: Activation) -> jax.Array:
    """Every expert for every token as three large matrix products; unchosen experts have gate zero.

    E/k times the useful arithmetic, and nothing to sort: with a handful of tiny experts neither form is faster.
    """
    e, d, f = experts.gate_EDF.shape
    side_by_side = lambda w_EDF: w_EDF.transpose(1, 0, 2).reshape(d, e * f)  # noqa: E731
    gate, up = x_TD @ side_by_side(experts.gate_EDF), x_TD @ side_by_side(experts.up_EDF)
    gates_TE = gates_TE.astype(x_TD.dtype)
    if experts.biases is None:
        hidden = activation(gate, up) * jnp.repeat(gates_TE, f, axis=1)
        return hidden @ experts.down_EFD.reshape(e * f, d)
    gate, up = gate + experts.biases.gate_EF.reshape(e * f), up + experts.biases.up_EF.reshape(e * f)
    hidden = activation(gate, up) * jnp.repeat(gates_TE, f, axis=1)
    return hidden @ experts.down_EFD.reshape(e * f, d) + gates_TE @ experts.biases.down_ED


def compute_chosen(
    x_TD: jax.Array, ids_Tk: jax.Array, gates_Tk: jax.Array, experts: Experts, activation: Activation
) -> jax.Array:
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
    if experts.biases is not None:
        # One row of zeros for what belongs to nobody here, so that it stays zero.
        padded = [jnp.pad(bias, ((0, 1), (0, 0))) for bias in experts.biases]
        gate_bias, up_bias, down_bias = (lookup(bias, ids_N[order_N]) for bias in padded)
        gate, up = gate + gate_bias, up + up_bias
    y_ND = grouped_matmul(activation(gate, up), experts.down_EFD, sizes_E)
    if experts.biases is not None:
        y_ND = y_ND + down_bias
    gates_N = gates_Tk.reshape(-1)[order_N]
    return collect(y_ND * gates_N[:, None], order_N, places_Tk)


def dense(
    x_TD: jax.Array, ids_Tk: jax.Array, gates_Tk: jax.Array, experts: Experts, activation: Activation = swiglu
) -> jax.Array:
    """The oracle: each device gathers all experts and computes its own tokens."""
    if axis_size("expert") > 1:
        experts = jax.tree.map(lambda w: jax.lax.all_gather(w, "expert", axis=0, tiled=True), experts)
    gates_TE = gates_by_expert(ids_Tk, gates_Tk, experts.gate_EDF.shape[0])
    return compute_all(x_TD, gates_TE, experts, activation)


def ring(
    x_TD: jax.Array, ids_Tk: jax.Array, gates_Tk: jax.Array, experts: Experts, activation: Activation = swiglu
) -> jax.Array:
    """All-gathers the tokens of the expert group, computes the own experts, reduce-scatters. Never drops a token."""
    if axis_size("expert") == 1:
        return compute_chosen(x_TD, ids_Tk, gates_Tk, experts, activation)
    x_TD, ids_Tk, gates_Tk = (jax.lax.all_gather(a, "expert", axis=0, tiled=True) for a in (x_TD, ids_Tk, gates_Tk))
    first = jax.lax.axis_index("expert") * experts.gate_EDF.shape[0]
    y_TD = compute_chosen(x_TD, ids_Tk - first, gates_Tk, experts, activation)
    return jax.lax.psum_scatter(y_TD, "expert", scatter_dimension=0, tiled=True)


DISPATCH = {"dense": dense, "ring": ring}
