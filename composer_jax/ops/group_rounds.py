"""Grouped matrix product in rounds of one batched product: the form for GPUs.

    y[t] = x[t] @ w[g(t)]

Round i multiplies the i-th block of rows of every group with the matrix of the group, all groups in one batched
product. A block has twice the rows of an average group, so balanced groups take one round, and the most unequal ones
half as many as there are groups. No weight is copied, and sums are taken in the same order in every run.

The number of rounds is known on the device only, and XLA's host code reads it after every round. Where no group can
have many rows (a token chooses an expert once, so a decode step of 64 conversations gives no expert more than 64), a
block has that many and one round does it, without a loop.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from composer_jax.ops.vma import pcast_varying, varying_axes

SMALLEST_BLOCK = 16
"""Fewest rows of a block: the rows of one instruction of a GPU's matrix units."""
BLOCK_PER_GROUP = 2
"""Rows of a block over those of an average group."""
MOST_IN_ONE_ROUND = 256
"""Most rows of a block that is larger than that. A row is one operation for each byte of a bfloat16 matrix. By its
specification an H100 does some 200 of them while it reads a byte, so the rows take about as long as reading the
matrices, which is necessary; not measured."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def rounds(x_TD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, most_per_group: int | None = None) -> jax.Array:
    """Returns the product of every row with the matrix of its group, [T,F] in the dtype of x; arguments are those of
    ops/grouped_matmul.py: grouped_matmul."""
    return _multiply(x_TD, w_EDF, sizes_E, most_per_group, "ebd,edf->ebf")


def _forward(x_TD, w_EDF, sizes_E, most_per_group):
    return rounds(x_TD, w_EDF, sizes_E, most_per_group), (x_TD, w_EDF, sizes_E)


def _backward(most, saved, dy_TF):
    x_TD, w_EDF, sizes_E = saved
    return _multiply(dy_TF, w_EDF, sizes_E, most, "ebf,edf->ebd"), _outer(x_TD, dy_TF, sizes_E, most), None


rounds.defvjp(_forward, _backward)


def _multiply(x_TD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, most: int | None, product: str) -> jax.Array:
    """Returns rows times the matrix of their group; `product` names the axes of blocks, matrices and result."""
    rows, width = x_TD.shape[0], w_EDF.shape["edf".index(product[-1])]

    def add_round(row_EB: jax.Array, y: jax.Array) -> jax.Array:
        block = jnp.einsum(product, _take(x_TD, row_EB), w_EDF, preferred_element_type=jnp.float32)
        return y.at[row_EB].set(block.astype(y.dtype), mode="drop", unique_indices=True)

    return _accumulate(add_round, jnp.zeros((rows, width), x_TD.dtype), x_TD, sizes_E, most)


def _outer(x_TD: jax.Array, dy_TF: jax.Array, sizes_E: jax.Array, most: int | None) -> jax.Array:
    """Returns x^T dy summed over the rows of each group, [E,D,F], accumulated in float32."""

    def add_round(row_EB: jax.Array, dw: jax.Array) -> jax.Array:
        x, dy = _take(x_TD, row_EB), _take(dy_TF, row_EB)
        return dw + jnp.einsum("ebd,ebf->edf", x, dy, preferred_element_type=jnp.float32)

    dw = jnp.zeros((len(sizes_E), x_TD.shape[1], dy_TF.shape[1]), jnp.float32)
    return _accumulate(add_round, dw, x_TD, sizes_E, most).astype(x_TD.dtype)


def _accumulate(
    add_round: Callable[[jax.Array, jax.Array], jax.Array],
    total: jax.Array,
    x_TD: jax.Array,
    sizes_E: jax.Array,
    most: int | None,
) -> jax.Array:
    """Returns the total after all rounds; `most` is most_per_group.

    add_round: receives the row of each place in the round's blocks, [E,B], and the total so far. A place without a row
    has a number beyond the rows, each another one.
    """
    rows, groups = x_TD.shape[0], len(sizes_E)
    most = rows if most is None else min(rows, most)
    block = min(rows, max(SMALLEST_BLOCK, -(-BLOCK_PER_GROUP * rows // groups)))
    if most <= MOST_IN_ONE_ROUND:
        block = most
    ends_E = jnp.cumsum(sizes_E)
    place_B = jnp.arange(block)
    beyond_EB = rows + jnp.arange(groups * block).reshape(groups, block)

    def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first, total = carry
        row_EB = (ends_E - sizes_E + first)[:, None] + place_B
        row_EB = jnp.where(row_EB < ends_E[:, None], row_EB, beyond_EB)
        return first + block, add_round(row_EB, total)

    start = pcast_varying(jnp.int32(0), varying_axes(sizes_E)), pcast_varying(total, varying_axes(x_TD))
    if block >= most:
        first, total = start
        if most < rows:  # a larger group would lose rows
            total = jnp.where(sizes_E.max() > most, jnp.nan, total)
        return step((first, total))[1]
    largest = sizes_E.max()
    return jax.lax.while_loop(lambda carry: carry[0] < largest, step, start)[1]


def _take(x_TD: jax.Array, row_EB: jax.Array) -> jax.Array:
    """Returns the rows, and zeros for numbers beyond them."""
    return x_TD.at[row_EB].get(mode="fill", fill_value=0, unique_indices=True)
