"""Dense dispatch, the oracle: each device all-gathers the experts and computes all of them for its own tokens."""

import jax

from composer_jax.ops.activation import Activation
from composer_jax.parallel.dispatch.compute import compute_all_experts
from composer_jax.parallel.dispatch.contract import DispatchAxes, Experts


def dense(
    x_TD: jax.Array,
    ids_Tk: jax.Array,
    gates_Tk: jax.Array,
    experts: Experts,
    activation: Activation,
    *,
    capacity_factor: float,
    axes: DispatchAxes,
) -> tuple[jax.Array, None]:
    """Computes every expert for every token, with gate zero where it was not chosen. Never drops a pair.

    `capacity_factor` has no effect.
    """
    for axis in reversed(axes.group):
        # Over an axis where tokens are replicated, the gathered experts and the output are replicated too.
        to = "varying" if axis in axes.tokens else "invarying"
        experts = jax.tree.map(lambda w: jax.lax.all_gather(w, axis, axis=0, tiled=True, to=to), experts)  # noqa: B023
    gates_TE = expand_gates(ids_Tk, gates_Tk, experts.gate_EDF.shape[0])
    return compute_all_experts(x_TD, gates_TE, experts, activation), None


def expand_gates(ids_Tk: jax.Array, gates_Tk: jax.Array, n: int) -> jax.Array:
    """Returns the gate of every token for each of n experts, [T,n]; zero where the expert was not chosen."""
    return (jax.nn.one_hot(ids_Tk, n, dtype=gates_Tk.dtype) * gates_Tk[..., None]).sum(-2)
