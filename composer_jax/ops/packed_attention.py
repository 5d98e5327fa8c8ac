"""Causal attention within whole rows: one contract, fused kernels on TPUs and GPUs, matrix products elsewhere.

The mask is a rule (`AttentionMask`) instead of an [S,S] array, which would have 64 billion entries per row at 256
thousand positions.
"""

import dataclasses

import jax
import jax.numpy as jnp

from composer_jax.ops import cudnn_attention, splash
from composer_jax.ops.attention import additive_mask, attend
from composer_jax.ops.attention_form import AttentionForm, RowShape, choose_form
from composer_jax.ops.local_gpu import local_gpu
from composer_jax.ops.shapes import check_shapes

BLOCK = 128
"""Queries of one product, at least; a block of queries is multiplied with the keys up to its own end only."""
GPU_BLOCK = 512
"""The same on a GPU's host, where XLA autotunes the products of every block while it compiles."""
MOST_BLOCKS = 16
"""Products per row, at most."""


@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """A query attends to the keys of its own segment at its position or earlier, and within its window.

    Segment 0 is padding, which attends to nothing.
    """

    positions_S: jax.Array
    """int32: position of each query in the whole row; key t is at position t."""
    segments_BS: jax.Array
    """int32: segment of each query."""
    key_segments_BT: jax.Array
    """int32: segment of each key."""
    is_whole_row: bool = True
    """Whether the queries are the whole row, at positions 0, 1, ..., rather than one device's shard of it."""
    window: int | None = None
    """Tokens, the query included, that a layer with a sliding window attends to; None: no layer has a window."""
    form: AttentionForm = "auto"
    """How attend_rows computes it (ops/attention_form.py)."""


def attend_rows(
    q_BSHX: jax.Array,
    k_BTNX: jax.Array,
    v_BTNV: jax.Array,
    mask: AttentionMask,
    windowed: jax.Array | None = None,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Returns masked softmax(q k^T) v, [B,S,H,V]. Heads, scale and sinks are those of ops/attention.py: attend.

    Padding attends to nothing: its outputs and their gradients are zero, and the fused forms skip it. A process with an
    NVIDIA GPU traces programs for it alone: cuDNN's form where it can run, for which other platforms have no lowering,
    and else the plain one. In other processes the platform that the program is compiled for decides.

    Args:
      windowed: bool scalar, whether this layer has the sliding window; None where no layer has (mask.window=None).

    Raises:
      UserError: mask.form names a fused form that cannot compute these shapes.
    """
    _check(q_BSHX, k_BTNX, v_BTNV, mask, windowed, sinks_H)

    (_, s, h, x), t, v_width = q_BSHX.shape, k_BTNX.shape[1], v_BTNV.shape[3]
    shape = RowShape(q_BSHX.dtype, s, t, h, x, v_width, mask.is_whole_row)
    gpu = local_gpu()

    def plain(q, k, v, windowed, sinks):
        return products(q, k, v, mask, windowed, sinks)

    def tpu_kernel(q, k, v, windowed, sinks):
        fields = mask.positions_S, mask.segments_BS, mask.key_segments_BT
        return splash.attend(q, k, v, *fields, mask.window, windowed, sinks)

    operands = (q_BSHX, k_BTNX, v_BTNV, windowed, sinks_H)
    # On a GPU no branch of platform_dependent: JAX hands the residuals and constants of every branch, scores and masks
    # too, through the others, as zeros.
    platform = "tpu" if gpu is None and mask.form != "cudnn" else "gpu"
    form = choose_form(mask.form, platform, gpu, shape).form
    if form == "cudnn":
        return cudnn_attention.attend(q_BSHX, k_BTNX, v_BTNV, mask.segments_BS, mask.window, windowed, sinks_H)
    if form == "splash":
        return jax.lax.platform_dependent(*operands, tpu=tpu_kernel, default=plain)
    return plain(*operands)


def products(
    q_BSHX: jax.Array,
    k_BTNX: jax.Array,
    v_BTNV: jax.Array,
    mask: AttentionMask,
    windowed: jax.Array | None = None,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """The form of plain matrix products. Where the queries are the whole row, keys after a block are not computed."""
    _check(q_BSHX, k_BTNX, v_BTNV, mask, windowed, sinks_H)
    s, t = q_BSHX.shape[1], k_BTNX.shape[1]
    least = BLOCK if local_gpu() is None else GPU_BLOCK
    size = -(-s // min(MOST_BLOCKS, max(1, s // least)))

    def block(start: int) -> jax.Array:
        queries = slice(start, min(start + size, s))
        keys = slice(0, queries.stop if mask.is_whole_row else t)
        positions_Q, segments_BQ = mask.positions_S[queries], mask.segments_BS[:, queries]
        distance_QT = positions_Q[:, None] - jnp.arange(keys.stop)[None, :]
        visible_QT = distance_QT >= 0
        if mask.window is not None:
            assert windowed is not None, f"mask.window={mask.window} needs `windowed`: whether this layer has it"
            visible_QT &= distance_QT < jnp.where(windowed, mask.window, t)
        visible_BQT = visible_QT & (segments_BQ[:, :, None] == mask.key_segments_BT[:, None, keys])
        return attend(q_BSHX[:, queries], k_BTNX[:, keys], v_BTNV[:, keys], additive_mask(visible_BQT), sinks_H)

    y_BSHV = jnp.concatenate([block(start) for start in range(0, s, size)], axis=1)
    return jnp.where(mask.segments_BS[:, :, None, None] > 0, y_BSHV, 0)


def _check(
    q_BSHX: jax.Array,
    k_BTNX: jax.Array,
    v_BTNV: jax.Array,
    mask: AttentionMask,
    windowed: jax.Array | None,
    sinks_H: jax.Array | None,
) -> None:
    check_shapes(
        q_BSHX=(q_BSHX, jnp.floating),
        k_BTNX=(k_BTNX, q_BSHX.dtype),
        v_BTNV=(v_BTNV, q_BSHX.dtype),
        positions_S=(mask.positions_S, jnp.integer),
        segments_BS=(mask.segments_BS, jnp.integer),
        key_segments_BT=(mask.key_segments_BT, jnp.integer),
        windowed=(windowed, bool),
        sinks_H=(sinks_H, jnp.float32),
    )
