"""Computes the chosen local experts for the tokens of a whole group, in rounds of a fixed number of rows.

After a ring's all-gather a device holds the tokens of its group, and only a fraction of their choices are for its own
experts. How many is known on the device only. A buffer for all of them would be n times too large, and a buffer for an
n-th may be too small; so the rows are computed in as many rounds of `rows` as necessary, one under balanced load.
Nothing is dropped. The backward pass is written by hand, because a loop of unknown length has no automatic gradient; it
recomputes the intermediate values of each round and sums gradients in float32.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.ops.activation import Activation
from composer_jax.ops.vma import match_vma, pcast_varying, varying_axes
from composer_jax.parallel.dispatch.compute import SortedRows, compute_sorted, sort_by_expert
from composer_jax.parallel.dispatch.contract import Experts

ROUNDS = "expert_rounds"
"""The named scope of the loop over rounds, in profiles and in traced programs."""


def compute_in_rounds(
    x_TD: jax.Array, ids_Tk: jax.Array, gates_Tk: jax.Array, experts: Experts, activation: Activation, rows: int
) -> jax.Array:
    """Computes what compute.py:compute_chosen_experts does, with buffers of `rows` rows instead of T*k."""
    leaves, structure = jax.tree.flatten(experts)
    x_TD, ids_Tk, gates_Tk, *leaves = match_vma(x_TD, ids_Tk, gates_Tk, *leaves)
    return _rounds(activation, rows, x_TD, ids_Tk, gates_Tk, jax.tree.unflatten(structure, leaves))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rounds(activation, rows, x_TD, ids_Tk, gates_Tk, experts):
    sorted_rows = sort_by_expert(ids_Tk.reshape(-1), experts)

    def add_round(start, y_TD):
        part = _select_round(sorted_rows, start, rows, ids_Tk.shape[1])
        y_RD = _compute(activation, part, len(x_TD), x_TD[part.tokens], part.gates(gates_Tk), experts)
        return y_TD.at[part.tokens].add(part.select(y_RD))

    y_TD = pcast_varying(jnp.zeros(x_TD.shape, jnp.float32), varying_axes(x_TD))
    return _loop(add_round, sorted_rows, rows, y_TD).astype(x_TD.dtype)


def _backward(activation, rows, operands, dy_TD):
    x_TD, ids_Tk, gates_Tk, experts = operands
    sorted_rows = sort_by_expert(ids_Tk.reshape(-1), experts)

    def add_round(start, gradients):
        dx_TD, dgates_N, dexperts = gradients
        part = _select_round(sorted_rows, start, rows, ids_Tk.shape[1])
        compute = functools.partial(_compute, activation, part, len(x_TD))
        _, transpose = jax.vjp(compute, x_TD[part.tokens], part.gates(gates_Tk), experts)
        dx_RD, dgates_R, dexperts_round = transpose(dy_TD[part.tokens])
        return (
            dx_TD.at[part.tokens].add(part.select(dx_RD)),
            dgates_N.at[part.pairs].add(jnp.where(part.valid, dgates_R, 0)),
            jax.tree.map(lambda total, part: total + part.astype(jnp.float32), dexperts, dexperts_round),
        )

    def zeros(array, dtype=None):
        return pcast_varying(jnp.zeros(array.shape, dtype or array.dtype), varying_axes(x_TD))

    wide_zeros = functools.partial(zeros, dtype=jnp.float32)
    start = wide_zeros(x_TD), zeros(gates_Tk.reshape(-1)), jax.tree.map(wide_zeros, experts)
    dx_TD, dgates_N, dexperts = _loop(add_round, sorted_rows, rows, start)
    dexperts = jax.tree.map(lambda total, weight: total.astype(weight.dtype), dexperts, experts)
    return dx_TD.astype(x_TD.dtype), None, dgates_N.reshape(gates_Tk.shape), dexperts


_rounds.defvjp(lambda activation, rows, *operands: (_rounds(activation, rows, *operands), operands), _backward)


class _Round(NamedTuple):
    """The R rows of one round."""

    pairs: jax.Array  # [R], the (token, choice) pair t k + j of each row; arbitrary where the row is not valid
    tokens: jax.Array  # [R], its token
    ids: jax.Array  # [R], its expert; E' where the row is not valid
    valid: jax.Array  # bool [R]
    sizes_E: jax.Array  # int32, rows of each expert

    def gates(self, gates_Tk: jax.Array) -> jax.Array:
        """Returns the gate of every row, zero where the row is not valid."""
        return jnp.where(self.valid, gates_Tk.reshape(-1)[self.pairs], 0)

    def select(self, rows_RD: jax.Array) -> jax.Array:
        """Returns the valid rows in float32, and zeros for the others."""
        return jnp.where(self.valid[:, None], rows_RD, 0).astype(jnp.float32)


def _select_round(all_rows: SortedRows, start: jax.Array, count: int, k: int) -> _Round:
    """Selects the sorted rows `start` .. `start` + count."""
    index = start + jnp.arange(count)
    ends = jnp.cumsum(all_rows.sizes_E)
    sizes = jnp.clip(ends - start, 0, count) - jnp.clip(ends - all_rows.sizes_E - start, 0, count)
    pairs = all_rows.order_N.at[index].get(mode="clip")
    n_experts = len(all_rows.sizes_E)
    ids = all_rows.ids_N.at[index].get(mode="fill", fill_value=n_experts)
    return _Round(pairs, pairs // k, ids, ids < n_experts, sizes)


def _loop(add_round, all_rows: SortedRows, count: int, carry):
    """Applies carry = add_round(first row, carry) to every round that has rows of local experts."""
    end = all_rows.sizes_E.sum()
    state = jnp.zeros_like(end), carry
    with jax.named_scope(ROUNDS):
        return jax.lax.while_loop(lambda s: s[0] < end, lambda s: (s[0] + count, add_round(*s)), state)[1]


def _compute(activation, part: _Round, tokens: int, x_RD: jax.Array, gates_R: jax.Array, experts: Experts) -> jax.Array:
    # The choices of a token differ (contract.py).
    return compute_sorted(x_RD, part.ids, part.sizes_E, experts, activation, gates_R, most_per_expert=tokens)
