"""The oracle: each device gathers all experts and computes its own tokens."""

import jax

from composer_jax.ops.activation import Activation, swiglu
from composer_jax.parallel.dispatch.compute import compute_all
from composer_jax.parallel.dispatch.contract import SPLIT, Dispatched, Experts, Split, dispatched


def dense(
    x_TD: jax.Array,
    ids_Tk: jax.Array,
    gates_Tk: jax.Array,
    experts: Experts,
    activation: Activation = swiglu,
    *,
    capacity_factor: float = 2.0,
    split: Split = SPLIT,
) -> Dispatched:
    """Every expert for every token, gates zero where it was not chosen. Drops nothing, at any capacity."""
    for axis in reversed(split.group):
        # Along an axis where the tokens are the same, so are the gathered experts and the output.
        to = "varying" if axis in split.tokens else "invarying"
        experts = jax.tree.map(lambda w: jax.lax.all_gather(w, axis, axis=0, tiled=True, to=to), experts)  # noqa: B023
    gates_TE = gates_by_expert(ids_Tk, gates_Tk, experts.gate_EDF.shape[0])
    return dispatched(compute_all(x_TD, gates_TE, experts, activation), x_TD)


def gates_by_expert(ids_Tk: jax.Array, gates_Tk: jax.Array, n: int) -> jax.Array:
    """Gate of every token for every expert, [T,n]; zero where the expert was not chosen."""
    return (jax.nn.one_hot(ids_Tk, n, dtype=gates_Tk.dtype) * gates_Tk[..., None]).sum(-2)
