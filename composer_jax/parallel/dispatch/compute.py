"""What experts compute for the rows that are on their device; nothing here moves between devices."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.ops.activation import Activation
from composer_jax.ops.grouped_matmul import grouped_matmul
from composer_jax.ops.lookup import lookup
from composer_jax.ops.permutation import permute_tokens, unpermute_tokens
from composer_jax.ops.vma import match_vma
from composer_jax.parallel.dispatch.contract import Experts


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
    # Marked alike here, the gradients of what devices share are summed per token and not per sorted row.
    x_TD, ids_Tk, gates_Tk, *_ = match_vma(x_TD, ids_Tk, gates_Tk, *jax.tree.leaves(experts))
    rows = by_expert(ids_Tk.reshape(-1), experts)
    places_Tk = rows.places_N.reshape(ids_Tk.shape)
    x_ND = permute_tokens(x_TD, rows.order_N, places_Tk)
    gates_N1 = permute_tokens(gates_Tk.reshape(-1, 1), rows.order_N, places_Tk.reshape(-1, 1))
    y_ND = compute_sorted(x_ND, rows.ids_N, rows.sizes_E, experts, activation, gates_N1[:, 0])
    return unpermute_tokens(y_ND, rows.order_N, places_Tk)


def compute_rows(x_MD: jax.Array, ids_M: jax.Array, experts: Experts, activation: Activation) -> jax.Array:
    """One expert for every row, in the order of the rows; zero where ids_M is not one of 0 .. E'-1."""
    x_MD, ids_M, *_ = match_vma(x_MD, ids_M, *jax.tree.leaves(experts))
    rows = by_expert(ids_M, experts)
    order = rows.order_N, rows.places_N[:, None]
    y_MD = compute_sorted(permute_tokens(x_MD, *order), rows.ids_N, rows.sizes_E, experts, activation)
    return unpermute_tokens(y_MD, *order)


class Rows(NamedTuple):
    """Rows in the order of their experts, those of other devices last."""

    order_N: jax.Array  # the permutation that sorts
    places_N: jax.Array  # its inverse
    ids_N: jax.Array  # sorted; E' where the expert is elsewhere
    sizes_E: jax.Array  # int32, rows of each expert


def by_expert(ids_N: jax.Array, experts: Experts) -> Rows:
    """Sorts rows by the expert that each asks for; ids other than 0 .. E'-1 are elsewhere."""
    n = experts.gate_EDF.shape[0]
    ids_N = jnp.where((ids_N >= 0) & (ids_N < n), ids_N, n)
    order_N = jnp.argsort(ids_N)
    return Rows(order_N, jnp.argsort(order_N), ids_N[order_N], jnp.bincount(ids_N, length=n).astype(jnp.int32))


def compute_sorted(
    x_ND: jax.Array,
    ids_N: jax.Array,
    sizes_E: jax.Array,
    experts: Experts,
    activation: Activation,
    gates_N: jax.Array | None = None,
) -> jax.Array:
    """The expert of every sorted row, sizes_E of them for each, times its gate; zero behind, where ids_N is E'.

    The gate multiplies the hidden values, before the last product: so its gradient needs no output, and where the
    inside is computed again for the backward pass, that product is left out.
    """
    gate, up = (grouped_matmul(x_ND, w, sizes_E) for w in (experts.gate_EDF, experts.up_EDF))
    if experts.biases is not None:
        # One row of zeros for what belongs to nobody here, so that it stays zero.
        padded = [jnp.pad(bias, ((0, 1), (0, 0))) for bias in experts.biases]
        gate_bias, up_bias, down_bias = (lookup(bias, ids_N) for bias in padded)
        gate, up = gate + gate_bias, up + up_bias
    hidden = activation(gate, up)
    if gates_N is not None:
        hidden = hidden * gates_N[:, None]
    y_ND = grouped_matmul(hidden, experts.down_EFD, sizes_E)
    if experts.biases is None:
        return y_ND
    return y_ND + (down_bias if gates_N is None else down_bias * gates_N[:, None])
