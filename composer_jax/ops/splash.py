"""Causal attention by JAX's fused TPU kernel ("splash attention"), with masks that are known only on the device.

The kernel holds the scores of one block of queries and keys at a time. Small arrays tell it which blocks to compute.
JAX's own helper computes those arrays from a static mask, this file from positions and segments. The mask can therefore
depend on the device's shard of a row (parallel/context.py), and blocks between different documents are skipped like
blocks of the future. Blocks of padding alone are skipped as well: a row without tokens computes none.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.ops.kernel_cost import KernelCall, KernelCost, array_bytes, kernel_cost
from composer_jax.ops.shapes import check_shapes
from composer_jax.ops.vma import match_vma, pcast_varying, varying_axes, without_vma_checks

LANES = 128
BLOCK = 1024
"""Queries and keys of a block, at most; VMEM holds their scores."""
MOST_PARTS = 16
"""Partial gradients of the queries, each as large as the queries, that the fused backward kernel may write."""


def attend(
    q_BSHX: jax.Array,
    k_BTNX: jax.Array,
    v_BTNV: jax.Array,
    positions_S: jax.Array,
    segments_BS: jax.Array,
    key_segments_BT: jax.Array,
    window: int | None = None,
    windowed: jax.Array | None = None,
    sinks_H: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Returns the same as ops/packed_attention.py: attend_rows, computed by the kernel. S and T are multiples of LANES.

    Args:
      positions_S, segments_BS, key_segments_BT, window: the fields of an AttentionMask.
      interpret: interprets the kernel's program, for tests without a TPU (slow).
    """
    check_shapes(
        q_BSHX=(q_BSHX, jnp.floating),
        k_BTNX=(k_BTNX, q_BSHX.dtype),
        v_BTNV=(v_BTNV, q_BSHX.dtype),
        positions_S=(positions_S, jnp.integer),
        segments_BS=(segments_BS, jnp.integer),
        key_segments_BT=(key_segments_BT, jnp.integer),
        windowed=(windowed, bool),
        sinks_H=(sinks_H, jnp.float32),
    )
    arrays = (q_BSHX, k_BTNX, v_BTNV, positions_S, segments_BS, key_segments_BT, sinks_H)
    arrays = [*match_vma(*arrays[:6]), None if sinks_H is None else pcast_varying(sinks_H, varying_axes(q_BSHX))]
    form = functools.partial(_attention, interpret)
    if window is None:
        y_BSHV = form(None, *arrays)
    else:
        y_BSHV = jax.lax.cond(windowed, functools.partial(form, window), functools.partial(form, None), *arrays)
    return jnp.where(arrays[4][:, :, None, None] > 0, y_BSHV, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(interpret, window, q, k, v, order, segments, key_segments, sinks):
    return _forward(interpret, window, q, k, v, order, segments, key_segments, sinks)[0]


def _forward(interpret, window, q, k, v, order, segments, key_segments, sinks):
    axes = varying_axes(q)
    with without_vma_checks() as plain:
        rule = tuple(map(plain, (order, segments, key_segments)))
        operands = (q, k, v) if sinks is None else (q, k, v, sinks)
        compiled = jax.jit(_value_and_transpose, static_argnums=(0, 1))
        y, transpose = compiled(interpret, window, rule, *map(plain, operands))
    restore_vma = functools.partial(pcast_varying, axes=axes)
    return restore_vma(y), jax.tree.map(restore_vma, transpose)


def _value_and_transpose(interpret, window, rule, *operands):
    # The addition derives a new value: an operand that is returned unchanged would keep its VMA type.
    rule, operands = jax.tree.map(lambda array: array + jnp.zeros((), array.dtype), (rule, operands))
    return jax.vjp(functools.partial(_kernel, interpret, window, *rule), *operands)


def _backward(interpret, window, transpose, dy):
    axes = varying_axes(dy)
    with without_vma_checks() as plain:
        gradients = jax.jit(lambda transpose, dy: transpose(dy))(jax.tree.map(plain, transpose), plain(dy))
    dq, dk, dv, *dsinks = (pcast_varying(gradient, axes) for gradient in gradients)
    # JAX's kernel returns the gradient of float32 sinks in the dtype of its outputs.
    return dq, dk, dv, None, None, None, dsinks[0].astype(jnp.float32) if dsinks else None


_attention.defvjp(_forward, _backward)


def _kernel(interpret, window, positions_S, segments_BS, key_segments_BT, q_BSHX, k_BTNX, v_BTNV, sinks_H=None):
    # Imported here: importing Pallas takes half a second, and only TPUs need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        BlockSizes,
        SegmentIds,
        splash_attention_kernel,
        splash_attention_mask_info,
    )

    bq, bt = (_block(array.shape[1], BLOCK) for array in (q_BSHX, k_BTNX))
    large = _block(k_BTNX.shape[1], 2 * BLOCK)
    # One fused kernel for all gradients computes five products of scores where two kernels compute seven, and writes a
    # partial gradient of the queries for every block of keys.
    fused = k_BTNX.shape[1] <= MOST_PARTS * large
    # The fused kernel's VMEM holds twice as many keys, and scores of half as many queries.
    bq_backward, bt_backward = (_block(q_BSHX.shape[1], max(BLOCK // 2, LANES)), large) if fused else (bq, bt)
    heads_first = lambda x: x.transpose(0, 2, 1, 3)  # noqa: E731

    def row(q_HSX, k_NTX, v_NTV, segments_S, key_segments_T):
        def info(bq: int, bt: int, *, key_by_key: bool):
            visible = _visible_blocks(positions_S, segments_S, key_segments_T, bq, bt, window)
            next_block = _next_blocks(visible.T).T if key_by_key else _next_blocks(visible)
            return splash_attention_mask_info.MaskInfo(
                next_block[None], None, visible[None].astype(jnp.int32), None, positions_S
            )

        by_query = info(bq, bt, key_by_key=False)
        kernel = splash_attention_kernel.SplashAttentionKernel(
            by_query,
            None if fused else by_query,
            info(bq_backward, bt_backward, key_by_key=True),
            block_sizes=BlockSizes(
                block_q=bq,
                block_kv=bt,
                block_kv_compute=bt,
                block_q_dkv=bq_backward,
                block_kv_dkv=bt_backward,
                block_kv_dkv_compute=bt,
                use_fused_bwd_kernel=fused,
                block_q_dq=None if fused else bq,
                block_kv_dq=None if fused else bt,
            ),
            is_mqa=False,
            save_residuals=False,
            mask_value=splash_attention_kernel.DEFAULT_MASK_VALUE,
            attn_logits_soft_cap=None,
            residual_checkpoint_name="attention",
            mask_function=_rule(window),
            interpret=interpret,
        )
        return kernel(q_HSX, k_NTX, v_NTV, SegmentIds(segments_S, key_segments_T), sinks_H)

    # The kernel divides by the sum of weights, which is 0 where a block of queries has no block of keys. A sink at the
    # value of masked scores makes it 1 there, so that outputs are 0, and has weight 0 beside real scores.
    no_sinks_H = jnp.full(q_BSHX.shape[2], splash_attention_kernel.DEFAULT_MASK_VALUE, jnp.float32)
    sinks_H = no_sinks_H if sinks_H is None else sinks_H
    q_BHSX, k_BNTX, v_BNTV = map(heads_first, (q_BSHX, k_BTNX, v_BTNV))
    # In a block with documents, padding meets padding: queries of it get a segment that no key has.
    y_BHSV = jax.vmap(row)(q_BHSX, k_BNTX, v_BNTV, jnp.where(segments_BS > 0, segments_BS, -1), key_segments_BT)
    return heads_first(y_BHSV)


def computed_pairs(segments_S: np.ndarray, window: int | None = None) -> int:
    """Returns how many pairs of a query and a key the forward kernel computes in a row on one device.

    segments_S: integers; padded to a length that the kernel supports.
    """
    row = np.pad(segments_S, (0, -len(segments_S) % LANES))
    size = _block(len(row), BLOCK)
    return int(_visible_blocks(np.arange(len(row)), row, row, size, size, window, np).sum()) * size**2


def _block(length: int, most: int) -> int:
    """Returns the largest multiple of LANES that divides `length` and is at most `most`."""
    return max(size for size in range(LANES, min(most, length) + 1, LANES) if length % size == 0)


@functools.cache  # the kernel is compiled once per function object
def _rule(window: int | None):
    if window is None:
        return lambda query, key: query >= key
    return lambda query, key: (query >= key) & (query < key + window)


def _visible_blocks(
    positions_S, segments_S, key_segments_T, bq: int, bt: int, window: int | None, xp: Any = jnp
) -> jax.Array:
    """Returns whether any query of a block may attend to any key of a block, bool [S/bq, T/bt].

    Segments rise along a row, except for padding (segment 0), which neither attends nor is attended to.

    xp: numpy or jax.numpy.
    """

    def ends(array, size):
        blocks = array.reshape(-1, size)
        return blocks.min(1), blocks.max(1)

    def documents(segments, size):
        """The first and the last; of padding alone a range that ends before it starts."""
        first, _ = ends(xp.where(segments > 0, segments, xp.iinfo(segments.dtype).max), size)
        return first, ends(xp.where(segments > 0, segments, -1), size)[1]

    (first, last), (low, high) = ends(positions_S, bq), documents(segments_S, bq)
    (first_key, last_key), (low_key, high_key) = ends(xp.arange(len(key_segments_T)), bt), documents(key_segments_T, bt)
    visible = (last[:, None] >= first_key) & (low[:, None] <= high_key) & (low_key <= high[:, None])
    if window is not None:
        visible &= last_key > first[:, None] - window
    return visible


def _next_blocks(visible: jax.Array) -> jax.Array:
    """Returns the column of the next block to compute, at or after each block in row-major order.

    int32, of the shape of `visible`. The kernel prefetches that block while it computes the current one; after the last
    block comes the first.
    """
    rows, columns = visible.shape
    number = jnp.where(visible.reshape(-1), jnp.arange(rows * columns), rows * columns)
    next_number = jax.lax.cummin(number, reverse=True)
    return jnp.where(next_number < rows * columns, next_number, number.min()).reshape(rows, columns) % columns


def _pairs_cost(call: KernelCall, per_pair: Callable[[int, int], int]) -> KernelCost:
    """Cost for rows of one document each: all blocks of queries and keys up to the diagonal, those on it computed
    whole. Keys and values are read again for every block of queries.

    per_pair: multiplications for each query and key, from the width of keys and of values.
    """
    q, k, v = [a for a in call.inputs if a.ndim >= 3 and jnp.issubdtype(a.dtype, jnp.floating)][:3]
    *_, queries, width = q.shape
    keys, parts = k.shape[-2], _partial_gradients(call)
    blocks = parts or keys // _block(keys, BLOCK)
    share = (blocks + 1) / (2 * blocks)
    rows = q.size // (queries * width)  # with heads
    again = (queries // _block(queries, BLOCK)) * share - 1
    flops = 2.0 * rows * queries * keys * share * per_pair(width, v.shape[-1])
    read = [a for a in call.inputs if jnp.issubdtype(a.dtype, jnp.floating)]
    return KernelCost("attention", flops, array_bytes(*read, *call.outputs) + max(again, 0) * array_bytes(k, v))


def _partial_gradients(call: KernelCall) -> int:
    """Returns the number of partial query gradients that a fused backward kernel writes; 0 for other kernels."""
    q = next(a for a in call.inputs if a.ndim >= 3 and jnp.issubdtype(a.dtype, jnp.floating))
    parts = [out for out in call.outputs if out.ndim == q.ndim + 1 and out.shape[-2:] == q.shape[-2:]]
    return parts[0].size // q.size if parts else 0


@kernel_cost("splash_mha_fwd*")
def _forward_cost(call: KernelCall) -> KernelCost:
    """q k^T and p v."""
    return _pairs_cost(call, lambda x, v: x + v)


@kernel_cost("splash_mha_dq*")
def _dq_cost(call: KernelCall) -> KernelCost:
    """q k^T, dy v^T and ds k."""
    return _pairs_cost(call, lambda x, v: 2 * x + v)


@kernel_cost("splash_mha_dkv*")
def _dkv_cost(call: KernelCall) -> KernelCost:
    """q k^T, dy v^T, p^T dy and ds^T q; also ds k in the fused kernel."""
    return _pairs_cost(call, lambda x, v: (3 if _partial_gradients(call) else 2) * x + 2 * v)
