"""Every token goes to every device of the group, which computes its own experts; the sums come back."""

import math

import jax

from composer_jax.ops.activation import Activation, swiglu
from composer_jax.ops.vma import match_vma
from composer_jax.parallel.dispatch.compute import compute_chosen
from composer_jax.parallel.dispatch.contract import SPLIT, Dispatched, Experts, Split, devices_along, dispatched
from composer_jax.parallel.dispatch.rounds import compute_in_rounds


def ring(
    x_TD: jax.Array,
    ids_Tk: jax.Array,
    gates_Tk: jax.Array,
    experts: Experts,
    activation: Activation = swiglu,
    *,
    capacity_factor: float = 2.0,
    split: Split = SPLIT,
) -> Dispatched:
    """All-gathers the tokens of the group, computes the own experts, reduce-scatters. Drops nothing: where more than
    capacity_factor times the mean choose experts of one device, it computes them in several rounds (rounds.py).

    A device receives (n - 1) T rows and sends as many sums, n the devices over which tokens are divided; along axes
    where they are the same, the sums of T rows are added up.
    """
    if not split.group:
        return dispatched(compute_chosen(x_TD, ids_Tk, gates_Tk, experts, activation), x_TD)
    # Marked alike before they are gathered, gradients are scattered first and then added up along `alike`.
    all_TD, ids_Tk, gates_Tk, *_ = match_vma(x_TD, ids_Tk, gates_Tk, *jax.tree.leaves(experts))
    if split.apart:
        gathered = (jax.lax.all_gather(a, split.apart, axis=0, tiled=True) for a in (all_TD, ids_Tk, gates_Tk))
        all_TD, ids_Tk, gates_Tk = gathered
    first = jax.lax.axis_index(split.group) * experts.gate_EDF.shape[0]
    rows = -(-math.ceil(capacity_factor * ids_Tk.size / devices_along(split.group)) // 8) * 8
    if rows < ids_Tk.size:
        y_TD = compute_in_rounds(all_TD, ids_Tk - first, gates_Tk, experts, activation, rows)
    else:
        y_TD = compute_chosen(all_TD, ids_Tk - first, gates_Tk, experts, activation)
    if split.apart:
        y_TD = jax.lax.psum_scatter(y_TD, split.apart, scatter_dimension=0, tiled=True)
    if split.alike:
        y_TD = jax.lax.psum(y_TD, split.alike)
    return dispatched(y_TD, x_TD)
