"""Grouped matrix product: rows sorted by group, one matrix per group (the experts of a mixture).

    y[t] = x[t] @ w[g(t)],   g(t) the group of row t: sizes[0] rows of group 0, then sizes[1] rows of group 1, ...

What stands in rows beyond the last group, which have no group, is not specified: there kernels leave what memory held,
which may be NaN, in the result and in the gradient of x. On a TPU this is the kernel behind `jax.lax.ragged_dot`, on a
Hopper GPU those of ops/hopper_grouped_matmul.py where they support the operands. On CPUs and other GPUs ragged_dot
computes every group for every row, so there blocks of rows go through ordinary matrix products, forward and backward:
on a CPU one block after the other, on a GPU a block of every group at once (ops/group_rounds.py).
`python -m benchmarks.grouped_matmul` measures it.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from composer_jax.ops import hopper_grouped_matmul
from composer_jax.ops.group_rounds import rounds
from composer_jax.ops.kernel_cost import KernelCall, KernelCost, array_bytes, kernel_cost
from composer_jax.ops.shapes import check_shapes
from composer_jax.ops.vma import match_vma, pcast_varying, varying_axes

BLOCK, SMALLEST_BLOCK = 128, 8
"""Most and fewest rows of one product: large enough to keep the cores busy, small enough to waste little at the end of
a group. In between, a block has twice the rows of an average group."""


def grouped_matmul(
    x_TD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, most_per_group: int | None = None
) -> jax.Array:
    """Returns the product of every row with the matrix of its group, [T,F] in the promoted dtype of both.

    Args:
      x_TD: rows, sorted by group. Rows without a group must be finite, in x and in the gradient of the result.
      w_EDF: one matrix per group.
      sizes_E: int32, rows in each group; the sum is at most T.
      most_per_group: no group has more rows; where a GPU relies on it and one has, the result is NaN. None: any group
        may have all of them.
    """
    check_shapes(x_TD=(x_TD, jnp.floating), w_EDF=(w_EDF, jnp.floating), sizes_E=(sizes_E, jnp.int32))
    forms: dict[str, Callable[..., jax.Array]] = dict(
        tpu=jax.lax.ragged_dot, cpu=blocked, default=functools.partial(rounds, most_per_group=most_per_group)
    )
    if hopper_grouped_matmul.supports(x_TD, w_EDF):
        forms["cuda"] = hopper_grouped_matmul.hopper
    return jax.lax.platform_dependent(*match_vma(x_TD, w_EDF, sizes_E), **forms)


@kernel_cost("ragged_dot_general")
def ragged_dot_cost(call: KernelCall) -> KernelCost:
    """Cost of `lax.ragged_dot` and its gradients: two operations per multiplication of the rows that have a group."""
    (x, y), (out,) = call.inputs[:2], call.outputs
    rows = x.shape[0]
    if out.ndim == 3:  # the gradient of the matrices, [E,D,F] from [T,D] and [T,F]
        return KernelCost(
            "grouped_matmul",
            call.occupancy * 2.0 * x.size * y.size / rows,
            call.occupancy * array_bytes(x, y) + array_bytes(out),
        )
    flops = 2.0 * x.size * out.size / rows
    return KernelCost("grouped_matmul", call.occupancy * flops, call.occupancy * array_bytes(x, out) + array_bytes(y))


@jax.custom_vjp
def blocked(x_TD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """The form for CPUs: 2 T D F operations, plus the unused rest of each group's last block."""
    return _multiply(x_TD, w_EDF, sizes_E, contracted=1)


def _backward(saved, dy_TF):
    x_TD, w_EDF, sizes_E = saved
    return _multiply(dy_TF, w_EDF, sizes_E, contracted=2), _outer(x_TD, dy_TF, sizes_E), None


blocked.defvjp(lambda *operands: (blocked(*operands), operands), _backward)


def _multiply(x_TD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, *, contracted: int) -> jax.Array:
    """Returns rows times the matrix of their group (contracted=1) or its transpose (contracted=2)."""
    rows = x_TD.shape[0]
    block = _block_size(rows, len(sizes_E))
    starts_E = jnp.cumsum(sizes_E) - sizes_E

    def group(e, y):
        w, end = w_EDF[e], starts_E[e] + sizes_E[e]

        def step(carry):
            begin, y = carry
            at = jnp.minimum(begin, rows - block)  # the last block overlaps the previous one instead of passing the end
            part = jax.lax.dynamic_slice_in_dim(x_TD, at, block)
            product = jax.lax.dot_general(
                part, w, (((1,), (contracted - 1,)), ((), ())), preferred_element_type=jnp.float32
            )
            row = at + jnp.arange(block)
            old = jax.lax.dynamic_slice_in_dim(y, at, block)
            new = jnp.where(((row >= begin) & (row < end))[:, None], product.astype(y.dtype), old)
            return begin + block, jax.lax.dynamic_update_slice_in_dim(y, new, at, 0)

        return jax.lax.while_loop(lambda carry: carry[0] < end, step, (starts_E[e], y))[1]

    width = w_EDF.shape[3 - contracted]
    y = pcast_varying(jnp.zeros((rows, width), x_TD.dtype), varying_axes(x_TD))
    return jax.lax.fori_loop(0, w_EDF.shape[0], group, y)


def _outer(x_TD: jax.Array, dy_TF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Returns x^T dy summed over the rows of each group, [E,D,F], accumulated in float32."""
    rows = x_TD.shape[0]
    block = _block_size(rows, len(sizes_E))
    starts_E = jnp.cumsum(sizes_E) - sizes_E
    axes = varying_axes(x_TD)

    def group(e, dw_EDF):
        end = starts_E[e] + sizes_E[e]

        def step(carry):
            begin, total = carry
            at = jnp.minimum(begin, rows - block)
            row = at + jnp.arange(block)
            inside = ((row >= begin) & (row < end))[:, None]
            x, dy = (jnp.where(inside, jax.lax.dynamic_slice_in_dim(a, at, block), 0) for a in (x_TD, dy_TF))
            product = jax.lax.dot_general(x, dy, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
            return begin + block, total + product

        zeros = pcast_varying(jnp.zeros((x_TD.shape[1], dy_TF.shape[1]), jnp.float32), axes)
        total = jax.lax.while_loop(lambda carry: carry[0] < end, step, (starts_E[e], zeros))[1]
        return jax.lax.dynamic_update_slice_in_dim(dw_EDF, total[None].astype(dw_EDF.dtype), e, 0)

    dw = jnp.zeros((sizes_E.shape[0], x_TD.shape[1], dy_TF.shape[1]), x_TD.dtype)
    return jax.lax.fori_loop(0, sizes_E.shape[0], group, pcast_varying(dw, axes))


def _block_size(rows: int, groups: int) -> int:
    doubled = -(-2 * rows // groups)
    return min(rows, BLOCK, max(SMALLEST_BLOCK, 1 << (doubled - 1).bit_length()))
