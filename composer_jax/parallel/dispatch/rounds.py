"""The chosen experts of many more tokens than belong here, in rounds of a fixed number of rows.

After a ring's all-gather a device has the tokens of its whole group, of whose choices only its share is for its own
experts. How many that are is known on the device only. Room for all of them would be n times too much, and an n-th of
them may be too little; so the rows are computed in as many rounds of `rows` as it takes, one where load is balanced.
Nothing is dropped, and what a round makes inside is made again in the backward pass, which is written here because a
loop of unknown length has none.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.ops.activation import Activation
from composer_jax.ops.vma import match_vma, pcast_varying, varying_axes
from composer_jax.parallel.dispatch.compute import Rows, by_expert, compute_sorted
from composer_jax.parallel.dispatch.contract import Experts

ROUNDS = "expert_rounds"
"""The named scope of the loop over rounds, in profiles and in traced programs."""


def compute_in_rounds(
    x_TD: jax.Array, ids_Tk: jax.Array, gates_Tk: jax.Array, experts: Experts, activation: Activation, rows: int
) -> jax.Array:
    """As compute.py: compute_chosen, which needs T*k rows at once where this needs `rows`."""
    leaves, structure = jax.tree.flatten(experts)
    x_TD, ids_Tk, gates_Tk, *leaves = match_vma(x_TD, ids_Tk, gates_Tk, *leaves)
    return _rounds(activation, rows, x_TD, ids_Tk, gates_Tk, jax.tree.unflatten(structure, leaves))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rounds(activation, rows, x_TD, ids_Tk, gates_Tk, experts):
    sorted_rows = by_expert(ids_Tk.reshape(-1), experts)

    def one(start, y_TD):
        part = _part(sorted_rows, start, rows, ids_Tk.shape[1])
        y_RD = _compute(activation, part, x_TD[part.tokens], part.gates(gates_Tk), experts)
        return y_TD.at[part.tokens].add(y_RD.astype(jnp.float32))

    y_TD = pcast_varying(jnp.zeros(x_TD.shape, jnp.float32), varying_axes(x_TD))
    return _loop(one, sorted_rows, rows, y_TD).astype(x_TD.dtype)


def _forward(activation, rows, *operands):
    return _rounds(activation, rows, *operands), operands


def _backward(activation, rows, operands, dy_TD):
    x_TD, ids_Tk, gates_Tk, experts = operands
    sorted_rows = by_expert(ids_Tk.reshape(-1), experts)

    def one(start, gradients):
        dx_TD, dgates_N, dexperts = gradients
        part = _part(sorted_rows, start, rows, ids_Tk.shape[1])
        compute = functools.partial(_compute, activation, part)
        _, transpose = jax.vjp(compute, x_TD[part.tokens], part.gates(gates_Tk), experts)
        dx_RD, dgates_R, more = transpose(dy_TD[part.tokens])
        return (
            dx_TD.at[part.tokens].add(dx_RD.astype(jnp.float32)),
            dgates_N.at[part.pairs].add(jnp.where(part.real, dgates_R, 0)),
            jax.tree.map(jnp.add, dexperts, more),
        )

    zeros = lambda array, dtype=None: pcast_varying(jnp.zeros(array.shape, dtype or array.dtype), varying_axes(x_TD))  # noqa: E731
    start = zeros(x_TD, jnp.float32), zeros(gates_Tk.reshape(-1)), jax.tree.map(zeros, experts)
    dx_TD, dgates_N, dexperts = _loop(one, sorted_rows, rows, start)
    return dx_TD.astype(x_TD.dtype), None, dgates_N.reshape(gates_Tk.shape), dexperts


_rounds.defvjp(_forward, _backward)


class _Part(NamedTuple):
    """The rows of one round."""

    pairs: jax.Array  # the (token, choice) pair of each, counted t k + j; any where the row is not real
    tokens: jax.Array  # its token
    ids: jax.Array  # its expert; E' where the row is not real
    real: jax.Array  # bool
    sizes_E: jax.Array  # int32, how many each expert has

    def gates(self, gates_Tk: jax.Array) -> jax.Array:
        return jnp.where(self.real, gates_Tk.reshape(-1)[self.pairs], 0)


def _part(all_rows: Rows, start: jax.Array, count: int, k: int) -> _Part:
    """The rows `start` .. `start` + count of the sorted ones."""
    here = start + jnp.arange(count)
    ends = jnp.cumsum(all_rows.sizes_E)
    sizes = jnp.clip(ends - start, 0, count) - jnp.clip(ends - all_rows.sizes_E - start, 0, count)
    pairs = all_rows.order_N.at[here].get(mode="clip")
    nobody = len(all_rows.sizes_E)
    ids = all_rows.ids_N.at[here].get(mode="fill", fill_value=nobody)
    return _Part(pairs, pairs // k, ids, ids < nobody, sizes)


def _loop(one, all_rows: Rows, count: int, carry):
    """carry = one(first row, carry) for every round that has rows of experts here."""
    end = all_rows.sizes_E.sum()
    state = jnp.zeros_like(end), carry
    with jax.named_scope(ROUNDS):
        return jax.lax.while_loop(lambda s: s[0] < end, lambda s: (s[0] + count, one(*s)), state)[1]


def _compute(activation, part: _Part, x_RD: jax.Array, gates_R: jax.Array, experts: Experts) -> jax.Array:
    return compute_sorted(x_RD, part.ids, part.sizes_E, experts, activation, gates_R)
