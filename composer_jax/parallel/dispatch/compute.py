"""Computes the experts of one device for rows that are already there; contains no communication."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.ops.activation import Activation
from composer_jax.ops.grouped_matmul import grouped_matmul
from composer_jax.ops.lookup import lookup
from composer_jax.ops.matmul import matmul
from composer_jax.ops.permutation import permute_tokens, unpermute_tokens
from composer_jax.ops.quantized_matmul import quantized_grouped_matmul, quantized_matmul
from composer_jax.ops.vma import match_vma
from composer_jax.parallel.dispatch.contract import Experts


def compute_all_experts(x_TD: jax.Array, gates_TE: jax.Array, experts: Experts, activation: Activation) -> jax.Array:
    """Computes every expert for every token as three large matrix products; unchosen experts have gate zero.

    This takes E/k times the necessary arithmetic and no sorting: with a handful of tiny experts the two are equally
    fast.
    """
    if experts.precision != "none":
        return _compute_each_expert(x_TD, gates_TE, experts, activation)
    e, d, f = experts.gate_EDF.shape
    concat_experts = lambda w_EDF: w_EDF.transpose(1, 0, 2).reshape(d, e * f)  # noqa: E731
    gate, up = (matmul(x_TD, concat_experts(w_EDF)) for w_EDF in (experts.gate_EDF, experts.up_EDF))
    gates_TE = gates_TE.astype(x_TD.dtype)
    if experts.biases is None:
        hidden = activation(gate, up) * jnp.repeat(gates_TE, f, axis=1)
        return matmul(hidden, experts.down_EFD.reshape(e * f, d))
    gate, up = gate + experts.biases.gate_EF.reshape(e * f), up + experts.biases.up_EF.reshape(e * f)
    hidden = activation(gate, up) * jnp.repeat(gates_TE, f, axis=1)
    return matmul(hidden, experts.down_EFD.reshape(e * f, d)) + gates_TE @ experts.biases.down_ED


def _compute_each_expert(x_TD: jax.Array, gates_TE: jax.Array, experts: Experts, activation: Activation) -> jax.Array:
    """The form of compute_all_experts for rounded operands: each expert has products, and so blocks, of its own."""
    matmul = functools.partial(quantized_matmul, precision=experts.precision)
    gate_ETF, up_ETF = (jax.vmap(matmul, (None, 0))(x_TD, w) for w in (experts.gate_EDF, experts.up_EDF))
    gates_ET1 = gates_TE.astype(x_TD.dtype).T[:, :, None]
    if experts.biases is not None:
        gate_ETF, up_ETF = gate_ETF + experts.biases.gate_EF[:, None], up_ETF + experts.biases.up_EF[:, None]
    y_ETD = jax.vmap(matmul)(activation(gate_ETF, up_ETF) * gates_ET1, experts.down_EFD)
    if experts.biases is not None:
        y_ETD = y_ETD + experts.biases.down_ED[:, None] * gates_ET1
    return y_ETD.sum(0)


def compute_chosen_experts(
    x_TD: jax.Array, ids_Tk: jax.Array, gates_Tk: jax.Array, experts: Experts, activation: Activation
) -> jax.Array:
    """Computes the chosen experts of every token: sort by expert, grouped products, unsort, weighted sum.

    ids_Tk count from the first local expert; pairs with ids outside 0 .. E'-1 add nothing.
    """
    # Matched here, gradients of replicated operands are summed per token and not per sorted row.
    x_TD, ids_Tk, gates_Tk, *_ = match_vma(x_TD, ids_Tk, gates_Tk, *jax.tree.leaves(experts))
    rows = sort_by_expert(ids_Tk.reshape(-1), experts)
    inverse_Tk, valid_Tk = (a.reshape(ids_Tk.shape) for a in (rows.inverse_N, rows.valid_N))
    x_ND = permute_tokens(x_TD, rows.order_N, inverse_Tk, valid_Tk)
    gates_N1 = permute_tokens(
        gates_Tk.reshape(-1, 1), rows.order_N, *(a.reshape(-1, 1) for a in (inverse_Tk, valid_Tk))
    )
    most = len(x_TD)  # the choices of a token differ (contract.py)
    y_ND = compute_sorted(x_ND, rows.ids_N, rows.sizes_E, experts, activation, gates_N1[:, 0], most_per_expert=most)
    return unpermute_tokens(y_ND, rows.order_N, inverse_Tk, valid_Tk)


def compute_rows(x_MD: jax.Array, ids_M: jax.Array, experts: Experts, activation: Activation) -> jax.Array:
    """Computes one expert for every row and keeps the order of rows; zero where ids_M is not in 0 .. E'-1."""
    x_MD, ids_M, *_ = match_vma(x_MD, ids_M, *jax.tree.leaves(experts))
    rows = sort_by_expert(ids_M, experts)
    permutation = rows.order_N, rows.inverse_N[:, None], rows.valid_N[:, None]
    x_MD = permute_tokens(x_MD, *permutation)
    y_MD = compute_sorted(x_MD, rows.ids_N, rows.sizes_E, experts, activation)
    return unpermute_tokens(y_MD, *permutation)


class SortedRows(NamedTuple):
    """The order of rows sorted by local expert, with rows of other devices' experts last."""

    order_N: jax.Array  # the permutation that sorts
    inverse_N: jax.Array  # its inverse
    valid_N: jax.Array  # bool, before sorting: whether the row's expert is one of this device
    ids_N: jax.Array  # sorted expert ids; E' for experts of other devices
    sizes_E: jax.Array  # int32, rows of each expert


def sort_by_expert(ids_N: jax.Array, experts: Experts) -> SortedRows:
    """Sorts rows by expert id; ids other than 0 .. E'-1 count as experts of other devices."""
    n = experts.gate_EDF.shape[0]
    valid_N = (ids_N >= 0) & (ids_N < n)
    ids_N = jnp.where(valid_N, ids_N, n)
    order_N = jnp.argsort(ids_N)
    sizes_E = jnp.bincount(ids_N, length=n).astype(jnp.int32)
    return SortedRows(order_N, jnp.argsort(order_N), valid_N, ids_N[order_N], sizes_E)


def compute_sorted(
    x_ND: jax.Array,
    ids_N: jax.Array,
    sizes_E: jax.Array,
    experts: Experts,
    activation: Activation,
    gates_N: jax.Array | None = None,
    most_per_expert: int | None = None,
) -> jax.Array:
    """Computes the expert of every sorted row times its gate.

    In the last rows, where ids_N is E', the result and the gradients of x_ND and gates_N may be anything, also NaN. No
    expert has more than most_per_expert rows (None: not known).

    The gate multiplies the hidden values before the last product. Its gradient then needs no output, and a backward
    pass that recomputes the hidden values skips that product.
    """
    product = grouped_matmul
    if experts.precision != "none":
        product = functools.partial(quantized_grouped_matmul, precision=experts.precision)
    gate, up = (product(x_ND, w, sizes_E, most_per_group=most_per_expert) for w in (experts.gate_EDF, experts.up_EDF))
    down_bias = None
    if experts.biases is not None:
        # The last rows, with id E', have a bias of zeros.
        padded = [jnp.pad(bias, ((0, 1), (0, 0))) for bias in experts.biases]
        gate_bias, up_bias, down_bias = (lookup(bias, ids_N) for bias in padded)
        gate, up = gate + gate_bias, up + up_bias
    # What the products leave in the last rows, forward and backward, goes no further: the next ones need finite rows.
    gate, up = (jnp.where((ids_N < len(sizes_E))[:, None], a, 0) for a in (gate, up))
    hidden = activation(gate, up)
    if gates_N is not None:
        hidden = hidden * gates_N[:, None]
    y_ND = product(hidden, experts.down_EFD, sizes_E, most_per_group=most_per_expert)
    if down_bias is None:
        return y_ND
    return y_ND + (down_bias if gates_N is None else down_bias * gates_N[:, None])
