"""Matrix products of fake-quantised operands, forward and backward (ops/fake_quantization.py).

    y  = Q(x) Q(w)       blocks along D
    dx = M(dy) M(w)^T    blocks along F
    dw = M(x)^T M(dy)    blocks along T

Q is the format of the forward pass, M is MXFP8. So every product reads operands that are quantised along the axis that
it contracts, as the hardware's instructions do, and x, w and dy are each quantised along two axes (NVIDIA, arXiv
2506.08027; Composer 2, arXiv 2603.24477: NVFP4' forward, MXFP8 backward). Sums are float32. The gradient passes the
roundings as if they were not there.

The blocks of dw hold 32 consecutive tokens of a device, whatever documents they belong to, and in a grouped product 32
consecutive rows of one group, counted from its first. How tokens lie on devices therefore changes the rounding of dw.
It changes neither y nor dx: a row of these depends on no other row of x and dy.

Operands are float32 arrays that hold numbers of few bits: this says what training in a format does to a model, and
costs time instead of saving it.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.ops.fake_quantization import MX_BLOCK, Scaled, fake_mxfp8, round_mxfp8, scaled_nvfp4
from composer_jax.ops.grouped_matmul import grouped_matmul
from composer_jax.ops.shapes import check_shapes
from composer_jax.ops.vma import match_vma, pcast_varying, varying_axes

Precision = Literal["none", "mxfp8", "nvfp4"]
"""Formats of the forward pass; "none" leaves operands as they are."""


class _Forward(NamedTuple):
    precision: Precision
    mesh_axis: str | None = None

    def quantize(self, x: jax.Array, axis: int) -> Scaled:
        if self.precision == "nvfp4":
            return scaled_nvfp4(x, axis, self.mesh_axis)
        return Scaled(fake_mxfp8(x.astype(jnp.float32), axis), jnp.float32(1))


def quantized_matmul(x_TD: jax.Array, w_DF: jax.Array, precision: Precision, mesh_axis: str | None = None) -> jax.Array:
    """Returns Q(x) Q(w), [T,F] in the dtype of x.

    Args:
      precision: Q, "mxfp8" or "nvfp4".
      mesh_axis: mesh axis over which D is sharded; the product is then this device's summand. None: not sharded.
    """
    check_shapes(x_TD=(x_TD, jnp.floating), w_DF=(w_DF, jnp.floating))
    return _matmul(_Forward(precision, mesh_axis), *match_vma(x_TD, w_DF))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(forward: _Forward, x_TD: jax.Array, w_DF: jax.Array) -> jax.Array:
    x, w = forward.quantize(x_TD, 1), forward.quantize(w_DF, 0)
    return (_dot(x.values, w.values) * x.scale * w.scale).astype(x_TD.dtype)


def _matmul_backward(forward, saved, dy_TF):
    x_TD, w_DF = saved
    x, w, dy = (a.astype(jnp.float32) for a in (x_TD, w_DF, dy_TF))
    dx = _dot(fake_mxfp8(dy, 1), fake_mxfp8(w, 1).T)
    dw = _dot(fake_mxfp8(x, 0).T, fake_mxfp8(dy, 0))
    return dx.astype(x_TD.dtype), dw.astype(w_DF.dtype)


_matmul.defvjp(lambda forward, *operands: (_matmul(forward, *operands), operands), _matmul_backward)


def quantized_grouped_matmul(
    x_TD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, precision: Precision, most_per_group: int | None = None
) -> jax.Array:
    """Returns Q(x) times the matrix Q(w) of each row's group, [T,F] in the dtype of x.

    Arguments are those of ops/grouped_matmul.py: grouped_matmul, and `precision` is Q, "mxfp8" or "nvfp4".
    """
    check_shapes(x_TD=(x_TD, jnp.floating), w_EDF=(w_EDF, jnp.floating), sizes_E=(sizes_E, jnp.int32))
    return _grouped(_Forward(precision), most_per_group, *match_vma(x_TD, w_EDF, sizes_E))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped(forward: _Forward, most: int | None, x_TD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    x, w = forward.quantize(x_TD, 1), forward.quantize(w_EDF, 1)
    y_TF = grouped_matmul(x.values, w.values, sizes_E, most)
    if forward.precision == "nvfp4":
        group_T = _groups(sizes_E, len(x_TD))
        y_TF = y_TF * x.scale * w.scale[:, 0].at[group_T].get(mode="clip")
    return y_TF.astype(x_TD.dtype)


def _grouped_backward(forward, most, saved, dy_TF):
    x_TD, w_EDF, sizes_E = saved
    x, w, dy = (a.astype(jnp.float32) for a in (x_TD, w_EDF, dy_TF))
    dx = grouped_matmul(fake_mxfp8(dy, 1), fake_mxfp8(w, 2).swapaxes(1, 2), sizes_E, most)
    # The product is linear in w, so its gradient does not depend on which w it is taken at.
    x, dy = (round_mxfp8(a, _group_block_amax(a, sizes_E)) for a in (x, dy))
    _, transpose = jax.vjp(lambda w: grouped_matmul(x, w, sizes_E, most), w)
    return dx.astype(x_TD.dtype), transpose(dy)[0].astype(w_EDF.dtype), None


_grouped.defvjp(lambda forward, most, *operands: (_grouped(forward, most, *operands), operands), _grouped_backward)


def _group_block_amax(x_TD: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Returns the largest magnitude of each number's block of rows of its group, [T,D]; no block mixes two groups."""
    group_T = _groups(sizes_E, len(x_TD))
    # Rows without a group are one more group, number E, and form blocks as well.
    first_row, first_block = (jnp.append(0, jnp.cumsum(n)) for n in (sizes_E, -(-sizes_E // MX_BLOCK)))
    block_T = first_block[group_T] + (jnp.arange(len(x_TD)) - first_row[group_T]) // MX_BLOCK
    most = len(x_TD) // MX_BLOCK + len(sizes_E) + 1
    amax = pcast_varying(jnp.zeros((most, x_TD.shape[1]), x_TD.dtype), varying_axes(x_TD))
    return amax.at[block_T].max(jnp.abs(x_TD), indices_are_sorted=True)[block_T]


def _groups(sizes_E: jax.Array, rows: int) -> jax.Array:
    """Returns the group of every row, int [T]; E for rows without one."""
    return jnp.searchsorted(jnp.cumsum(sizes_E), jnp.arange(rows), side="right", method="compare_all")


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    # The default precision is exact: a number of at most 6 significant bits is a bfloat16 and a TF32.
    return jnp.matmul(a, b, precision=jax.lax.Precision.DEFAULT, preferred_element_type=jnp.float32)
