"""Attention of a few new tokens over the pages of a decode cache on NVIDIA GPUs, by a Triton kernel of Pallas.

The kernel reads each entry where it lies: at the layer's offset in the array of all layers, in the page that the row's
table names. What JAX ships takes this cache only after a copy: cuDNN's paged attention and JAX's own Pallas kernel
(jax.experimental.pallas.ops.gpu.paged_attention) want the keys and the values of one layer as an array each.

Few rows with few heads of keys would leave most of a GPU idle, so a row's range of keys is divided into parts of equal
length (Flash-Decoding: Dao, Haziza, Massa and Sizov 2023). A part yields weighted values, their sum of weights and the
largest score, which XLA merges afterwards, together with the attention sinks. Operands of products have the compute
dtype, everything else is float32, as in ops/cached_attention.py.

JAX 0.11 calls Pallas' Triton backend deprecated. Its successor, Mosaic, can multiply small matrices, or run on GPUs
before Hopper, only from JAX 0.11 on (mosaic_gpu.mma); this package also runs on 0.10.2.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.ops.attention import MASKED, group_queries, group_sinks, ungroup_outputs
from composer_jax.ops.entry_parts import EntryParts
from composer_jax.ops.local_gpu import LocalGpu

NARROWEST = 16
"""Rows and columns of the smallest matrices that a GPU's matrix units multiply."""
MOST_TOKENS = 16
"""New tokens of a row, at most; those of a prefill are large products."""
SUMS = 64 * 128
"""Numbers of float32 weighted values that a block of 128 threads holds in registers: 64 per thread."""
LOAD = 16 << 10
"""Bytes of entries that one step of the kernel's loop reads, at least NARROWEST tokens."""
STAGES = 3
"""Steps in flight: one reads the page table, one copies entries to the chip, one multiplies."""
MOST_LOAD = 32 << 10
"""Bytes of entries that NARROWEST tokens may have: with queries beside them they fit into the 99 KiB that a block of
threads has on GPUs of compute capability 8.6 and 8.9."""
BLOCKS = 512
"""Blocks of threads that a call is divided into where contexts are long enough: about four for each of the 132
multiprocessors of an H100."""


def supports(gpu: LocalGpu | None, q_BSHX: jax.Array, entries_LZTX: jax.Array, parts: EntryParts) -> bool:
    """Returns whether the kernel takes these queries and entries on this process's GPU (None: it has none).

    It takes 16-bit floats and float32, one dtype for both, without scales; rows of few tokens; keys and values whose
    widths NARROWEST divides, and whose sums and loads a block of threads can hold.
    """
    if gpu is None or gpu.capability < (8, 0):  # Triton's oldest
        return False
    if q_BSHX.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32) or entries_LZTX.dtype != q_BSHX.dtype:
        return False
    if q_BSHX.shape[1] > MOST_TOKENS or parts.key_width % NARROWEST or parts.value_width % NARROWEST:
        return False
    load = NARROWEST * parts.head_width * q_BSHX.dtype.itemsize
    return parts.value_width * NARROWEST <= SUMS and load <= MOST_LOAD


def attend(
    q_BSHX: jax.Array,
    entries_LZTX: jax.Array,
    layer: jax.Array | int,
    tables_BJ: jax.Array,
    first_BS: jax.Array,
    last_BS: jax.Array,
    parts: EntryParts,
    sinks_H: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Returns the same as ops/cached_attention.py: attend_cache, [B,S,H,V]; `supports` has the limits.

    Args:
      q_BSHX: queries, already multiplied by the logit scale.
      entries_LZTX, layer, tables_BJ: fields of a LayerCache.
      first_BS, last_BS: fields of a KeyRange.
      interpret: whether JAX emulates the kernel.
    """
    s, n = q_BSHX.shape[1], parts.n_heads
    g = q_BSHX.shape[2] // n
    q_BNQX = group_queries(q_BSHX, n)
    tiling = choose_tiling(q_BNQX, entries_LZTX, tables_BJ.shape[1], parts)
    ranges_BQ = (jnp.repeat(array, g, axis=1) for array in (first_BS, last_BS))
    operands = jnp.asarray(layer, jnp.int32).reshape(1), tables_BJ, *ranges_BQ, q_BNQX, entries_LZTX
    y_BNPQV, largest_BNPQ, total_BNPQ = _call_kernel(*operands, parts=parts, tiling=tiling, interpret=interpret)
    largest_BNQ = largest_BNPQ.max(2)
    if sinks_H is not None:
        sinks_NQ = group_sinks(sinks_H, n, s)[..., 0]
        largest_BNQ = jnp.maximum(largest_BNQ, sinks_NQ)
    weight_BNPQ = jnp.exp(largest_BNPQ - largest_BNQ[:, :, None])
    total_BNQ = (total_BNPQ * weight_BNPQ).sum(2)
    if sinks_H is not None:
        total_BNQ += jnp.exp(sinks_NQ - largest_BNQ)
    y_BNQV = (y_BNPQV * weight_BNPQ[..., None]).sum(2) / total_BNQ[..., None]
    y_BSHV = ungroup_outputs(y_BNQV.astype(q_BSHX.dtype), g)
    return jnp.where(last_BS[..., None, None] >= 0, y_BSHV, 0)


class Tiling(NamedTuple):
    """How the work of a call is divided; powers of two except for `splits`."""

    queries: int
    """Queries of a block of threads."""
    tokens: int
    """Tokens whose entries a step of the loop reads."""
    splits: int
    """P: equal parts of a row's range of keys, each of another block of threads."""


def choose_tiling(q_BNQX: jax.Array, entries_LZTX: jax.Array, pages: int, parts: EntryParts) -> Tiling:
    """Returns the tiling for queries of B rows and page tables of this many pages."""
    b, n, q, _ = q_BNQX.shape
    at_least = lambda number: 1 << (number - 1).bit_length()  # noqa: E731
    at_most = lambda number: 1 << (number.bit_length() - 1)  # noqa: E731
    queries = max(NARROWEST, min(at_least(q), at_most(SUMS // parts.value_width)))
    load = parts.head_width * entries_LZTX.dtype.itemsize
    tokens = at_most(max(NARROWEST, min(LOAD // load, SUMS // queries)))
    blocks, steps = b * n * -(-q // queries), -(-pages * entries_LZTX.shape[2] // tokens)
    return Tiling(queries, tokens, min(-(-BLOCKS // blocks), steps))


@functools.partial(jax.jit, static_argnames=("parts", "tiling", "interpret"))
def _call_kernel(
    layer_1: jax.Array,
    tables_BJ: jax.Array,
    first_BQ: jax.Array,
    last_BQ: jax.Array,
    q_BNQX: jax.Array,
    entries_LZTX: jax.Array,
    *,
    parts: EntryParts,
    tiling: Tiling,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the weighted values [B,N,P,Q,V] of each part of the context, the largest score and the sum of weights."""
    # Imported here: importing Pallas takes a quarter of a second, and only GPUs need it.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    b, n, q, _ = q_BNQX.shape
    sums = [jax.ShapeDtypeStruct((b, n, tiling.splits, q, *v), jnp.float32) for v in ((parts.value_width,), (), ())]
    return pl.pallas_call(
        functools.partial(gpu_paged_attention, parts=parts, tiling=tiling),
        out_shape=tuple(sums),
        grid=(b, n * pl.cdiv(q, tiling.queries), tiling.splits),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=STAGES),
        interpret=interpret,
        name="gpu_paged_attention",
    )(layer_1, tables_BJ, first_BQ, last_BQ, q_BNQX, entries_LZTX)


def gpu_paged_attention(
    layer_ref,
    tables_ref,
    first_ref,
    last_ref,
    q_ref,
    entries_ref,
    y_ref,
    largest_ref,
    total_ref,
    *,
    parts: EntryParts,
    tiling: Tiling,
):
    """The kernel: what a block of threads does. Profiles call it by its name."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    rows, tokens, n_splits = tiling
    page, blocks = entries_ref.shape[2], pl.cdiv(q_ref.shape[2], rows)
    row, head, part = pl.program_id(0), jax.lax.div(pl.program_id(1), blocks), pl.program_id(2)
    first_query = jax.lax.rem(pl.program_id(1), blocks) * rows
    queries, exists_Q = pl.ds(first_query, rows), first_query + jnp.arange(rows) < q_ref.shape[2]
    first_Q = plgpu.load(first_ref.at[row, queries], mask=exists_Q, other=0)
    last_Q = plgpu.load(last_ref.at[row, queries], mask=exists_Q, other=-1)
    layer, end = layer_ref[0], jnp.max(last_Q) + 1
    start = jnp.min(jnp.where(last_Q >= 0, first_Q, end))
    steps = pl.cdiv(end - start, tokens)
    steps_per_split = pl.cdiv(steps, n_splits)

    key_cuts, value_cuts = _powers_of_two(parts.key_width), _powers_of_two(parts.value_width)
    exists = lambda size: jnp.broadcast_to(exists_Q[:, None], (rows, size))  # noqa: E731
    q_places = [(q_ref.at[row, head, queries, pl.ds(*cut)], exists(cut[1])) for cut in key_cuts]
    q_parts = [plgpu.load(place, mask=mask, other=0) for place, mask in q_places]

    def step(i, carry):
        position_T = start + i * tokens + jnp.arange(tokens)
        inside_T = jnp.minimum(position_T, end - 1)  # entries beyond it are stale, and pages may not exist
        page_T, offset_T = tables_ref[row, jax.lax.div(inside_T, page)], jax.lax.rem(inside_T, page)

        @functools.cache  # so that keys which serve as values are read once
        def read(at: int, stride: int, size: int) -> jax.Array:
            return entries_ref[layer, page_T, offset_T, pl.ds(head * stride + at, size)]

        k_stride, v_stride = (width if parts.n_heads > 1 else 0 for width in (parts.key_width, parts.value_width))
        keys = [read(at, k_stride, size) for at, size in key_cuts]
        scores = sum(plgpu.dot(a, k, trans_b=True) for a, k in zip(q_parts, keys, strict=True))
        seen_QT = (position_T >= first_Q[:, None]) & (position_T <= last_Q[:, None])
        values = [read(parts.first_value + at, v_stride, size) for at, size in value_cuts]
        return _add_block(carry, jnp.where(seen_QT, scores, MASKED), values)

    zeros = [jnp.zeros((rows, size), jnp.float32) for _, size in value_cuts]
    carry = jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32), *zeros
    bounds = part * steps_per_split, jnp.minimum((part + 1) * steps_per_split, steps)
    largest_Q, total_Q, *sums = jax.lax.fori_loop(*bounds, step, carry)
    plgpu.store(largest_ref.at[row, head, part, queries], largest_Q, mask=exists_Q)
    plgpu.store(total_ref.at[row, head, part, queries], total_Q, mask=exists_Q)
    for (at, size), values in zip(value_cuts, sums, strict=True):
        plgpu.store(y_ref.at[row, head, part, queries, pl.ds(at, size)], values, mask=exists(size))


def _add_block(carry: Sequence[jax.Array], scores_QT: jax.Array, values: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Returns the largest score, the sum of weights and the weighted values, [Q,V] for each [T,V] of `values`."""
    from jax.experimental.pallas import triton as plgpu

    largest_Q, total_Q, *sums = carry
    new_Q = jnp.maximum(largest_Q, scores_QT.max(1))
    shrink_Q, weights_QT = jnp.exp(largest_Q - new_Q), jnp.exp(scores_QT - new_Q[:, None])
    added = [plgpu.dot(weights_QT.astype(v.dtype), v) for v in values]
    sums = [old * shrink_Q[:, None] + new for old, new in zip(sums, added, strict=True)]
    return new_Q, total_Q * shrink_Q + weights_QT.sum(1), *sums


def _powers_of_two(width: int) -> list[tuple[int, int]]:
    """Returns (start, size) of parts that make up a width, from the largest down: Triton's arrays have such sizes."""
    sizes = [1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1]
    return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]
