"""Ring dispatch: all-gathers the tokens of the group, computes the local experts, reduce-scatters the sums."""

import math

import jax

from composer_jax.ops.activation import Activation
from composer_jax.ops.vma import match_vma
from composer_jax.parallel.dispatch.compute import compute_chosen_experts
from composer_jax.parallel.dispatch.contract import DispatchAxes, Experts, group_size
from composer_jax.parallel.dispatch.rounds import compute_in_rounds


def ring(
    x_TD: jax.Array,
    ids_Tk: jax.Array,
    gates_Tk: jax.Array,
    experts: Experts,
    activation: Activation,
    *,
    capacity_factor: float,
    axes: DispatchAxes,
) -> tuple[jax.Array, None]:
    """Computes the local experts for the tokens of the whole group. Never drops a pair.

    If the local experts are chosen more than capacity_factor times as often as the mean, they are computed in several
    rounds (rounds.py). With tokens sharded over n devices, a device receives (n - 1) T rows and sends as many partial
    sums. Over axes where tokens are replicated, the T partial sums are summed by a psum.
    """
    if not axes.group:
        return compute_chosen_experts(x_TD, ids_Tk, gates_Tk, experts, activation), None
    # Matched before the all-gather, so that gradients are scattered first and then summed over `replicated_axes`.
    all_TD, ids_Tk, gates_Tk, *_ = match_vma(x_TD, ids_Tk, gates_Tk, *jax.tree.leaves(experts))
    if axes.sharded_axes:
        gathered = (jax.lax.all_gather(a, axes.sharded_axes, axis=0, tiled=True) for a in (all_TD, ids_Tk, gates_Tk))
        all_TD, ids_Tk, gates_Tk = gathered
    first = jax.lax.axis_index(axes.group) * experts.gate_EDF.shape[0]
    rows = -(-math.ceil(capacity_factor * ids_Tk.size / group_size(axes.group)) // 8) * 8
    if rows < ids_Tk.size:
        y_TD = compute_in_rounds(all_TD, ids_Tk - first, gates_Tk, experts, activation, rows)
    else:
        y_TD = compute_chosen_experts(all_TD, ids_Tk - first, gates_Tk, experts, activation)
    if axes.sharded_axes:
        y_TD = jax.lax.psum_scatter(y_TD, axes.sharded_axes, scatter_dimension=0, tiled=True)
    if axes.replicated_axes:
        y_TD = jax.lax.psum(y_TD, axes.replicated_axes)
    return y_TD, None
