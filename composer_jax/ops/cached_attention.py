"""Softmax attention against a decode cache whose entries lie in pages, one block of rows and pages after the other.

The softmax is normalised at the end, with a running maximum and a running sum (online softmax: Milakov and Gimelshein
2018, arXiv 1805.02867; FlashAttention, arXiv 2205.14135, algorithm 1). A block is used while it is in the processor's
cache, and a row's context is never copied as a whole. Blocks that no query of the rows attends to are not read, so the
work follows the longest context among the rows of a block: put contexts of similar lengths beside each other.

On TPUs and NVIDIA GPUs kernels compute the calls that they support and copy no page (ops/tpu_paged_attention.py,
ops/gpu_paged_attention.py). On a GPU without the kernel the host reads the bounds of the loop over blocks, in every
layer. So one new token per row is computed there in a fixed number of blocks, those of the whole page table: give it a
table that is little longer than the longest context.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.ops import gpu_paged_attention, tpu_paged_attention
from composer_jax.ops.attention import (
    Scales,
    additive_mask,
    group_queries,
    group_sinks,
    masked_scores,
    ungroup_outputs,
)
from composer_jax.ops.attention_form import AttentionForm
from composer_jax.ops.entry_parts import EntryParts
from composer_jax.ops.kernel_cost import AT_MOST
from composer_jax.ops.local_gpu import local_gpu
from composer_jax.ops.shapes import check_shapes
from composer_jax.ops.vma import match_vma, pcast_varying, varying_axes, without_vma_checks


@dataclasses.dataclass(frozen=True)
class BlockSize:
    """How much one step of the loop computes, for a platform."""

    queries: int
    """Most new tokens, at least one row of them."""
    n_bytes: int
    """Bytes of entries, of keys and values where they are expanded, and of scores; at least one page of each row."""


CPU_BLOCK, BLOCK = BlockSize(16, 1 << 20), BlockSize(1 << 20, 64 << 20)
"""On a CPU a block stays in a core's cache; elsewhere it is large, so that starting its products costs little."""

CPU_LANES = 16
"""float32 numbers of an AVX-512 register."""


class KeyRange(NamedTuple):
    """The positions of a context that each new token attends to, both ends included."""

    first_BS: jax.Array
    """int32."""
    last_BS: jax.Array
    """int32; -1 for padding, which attends to nothing."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("entries_LZTX", "scales_LZTG", "layer", "tables_BJ"),
    meta_fields=("width",),
)
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """The cache entries of one layer: pages, and a table of the pages of each row's context."""

    entries_LZTX: jax.Array
    """Entries of all layers in Z pages of T tokens, in the compute dtype or int8; X may be wider than an entry."""
    scales_LZTG: jax.Array | None
    """float32: one scale per part of an int8 entry; None in the compute dtype."""
    layer: jax.Array | int
    tables_BJ: jax.Array
    """int32: the pages of each row's context, in order."""
    width: int
    """Numbers of an entry."""

    def read(self, first: jax.Array | int, n: int) -> tuple[jax.Array, jax.Array | None]:
        """Returns the entries [B,nT,width] of pages first to first+n-1 of every row, and their scales [B,nT,G]."""
        scales = None if self.scales_LZTG is None else self._take(self.scales_LZTG, first, n, slice(None))
        return self._take(self.entries_LZTX, first, n, slice(None))[..., : self.width], scales

    def read_joined(self, first: jax.Array | int, n: int, parts: EntryParts) -> tuple[jax.Array, jax.Array]:
        """Returns keys [B,nT,1,NX] and values [B,nT,1,NV] of the same pages, those of all heads as one head's."""
        end = parts.first_value + parts.n_heads * parts.value_width
        slices = slice(parts.n_heads * parts.key_width), slice(parts.first_value, end)
        keys, values = (self._take(self.entries_LZTX, first, n, part)[:, :, None] for part in slices)
        return keys, values

    def _take(self, array_LZTX: jax.Array, first: jax.Array | int, n: int, part: slice) -> jax.Array:
        """Returns a part of each entry of some pages, [B,nT,X]."""
        pages_BN = jax.lax.dynamic_slice_in_dim(self.tables_BJ, first, n, axis=1)
        taken_BNTX = array_LZTX[self.layer, pages_BN, :, part]
        return taken_BNTX.reshape(len(taken_BNTX), -1, taken_BNTX.shape[-1])


ReadBlock = Callable[[LayerCache, jax.Array | int, int], tuple[jax.Array, jax.Array, Scales | None]]
"""(cache, first page, number of pages) -> keys [B,T,N,X], values [B,T,N,V], and their scales."""
Split = Callable[[jax.Array, jax.Array | None], tuple[jax.Array, jax.Array, Scales | None]]
"""(entries [B,T,X], scales [B,T,G] or None) -> keys [B,T,N,X], values [B,T,N,V], and their scales.

EntryParts are such functions.
"""


def attend_cache(
    q_BSHX: jax.Array,
    cache: LayerCache,
    split: Split,
    keys: KeyRange,
    sinks_H: jax.Array | None = None,
    *,
    form: AttentionForm = "auto",
    has_window: bool = False,
    expanded_width: int = 0,
) -> jax.Array:
    """Returns softmax(q k^T) v over each query's range of keys in a layer's cache, [B,S,H,V].

    Heads and sinks are those of `attend`. A query without keys gets zeros.

    Args:
      q_BSHX: queries, already multiplied by the logit scale.
      split: the keys and values in entries. Kernels need EntryParts.
      form: "plain" means without the kernels.
      has_window: whether queries attend to a window of their context in some layers. GPUs without the kernel, too, then
        read only the blocks that a query attends to.
      expanded_width: numbers of the keys and values of a token where `split` computes new ones; 0 where it takes parts
        of the entry.
    """
    check_shapes(q_BSHX=(q_BSHX, jnp.floating), sinks_H=(sinks_H, jnp.float32))
    check_shapes(first_BS=(keys.first_BS, jnp.int32), last_BS=(keys.last_BS, jnp.int32))
    read = lambda cache, first, n: split(*cache.read(first, n))  # noqa: E731
    in_blocks = functools.partial(_attend_in_blocks, read=read, expanded_width=expanded_width)
    on_cpu, elsewhere = (functools.partial(in_blocks, size=size) for size in (CPU_BLOCK, BLOCK))
    on_gpu = functools.partial(elsewhere, all_blocks=q_BSHX.shape[1] == 1 and not has_window)
    on_tpu = None
    if isinstance(split, EntryParts):
        entries_LZTX = cache.entries_LZTX
        if split.value_in_key:
            on_cpu, elsewhere, on_gpu = (_narrow(blocks, split.value_width) for blocks in (on_cpu, elsewhere, on_gpu))
        if split.n_heads > 1 and q_BSHX.shape[1] * q_BSHX.shape[2] <= CPU_LANES and cache.scales_LZTG is None:
            on_cpu = functools.partial(_attend_joined, parts=split)
        if form != "plain" and tpu_paged_attention.supports(q_BSHX, entries_LZTX, split):
            on_tpu = functools.partial(_attend_in_pages, kernel=tpu_paged_attention.attend, parts=split)
        if form != "plain" and gpu_paged_attention.supports(local_gpu(), q_BSHX, entries_LZTX, split):
            on_gpu = functools.partial(_attend_in_pages, kernel=gpu_paged_attention.attend, parts=split)
    return jax.lax.platform_dependent(q_BSHX, cache, keys, sinks_H, cpu=on_cpu, tpu=on_tpu or elsewhere, default=on_gpu)


def _narrow(attend: Callable[..., jax.Array], width: int) -> Callable[..., jax.Array]:
    return lambda *operands: attend(*operands)[..., :width]


def _attend_joined(
    q_BSHX: jax.Array, cache: LayerCache, keys: KeyRange, sinks_H: jax.Array | None, *, parts: EntryParts
) -> jax.Array:
    """The form of CPUs for few queries: the heads of keys are one wide head, of which a query is zero outside its own.

    A product per head would first transpose keys and values in memory. With CPU_LANES queries or fewer, the scores cost
    no more this way: a register holds one number for each of them, used or not. The weighted values take N times the
    multiplications, which is less than the transposition.
    """
    h, n = q_BSHX.shape[2], parts.n_heads
    own_HN1 = (jnp.arange(h)[:, None] // (h // n) == jnp.arange(n))[..., None]
    wide_BSHX = jnp.where(own_HN1, q_BSHX[:, :, :, None], 0).reshape(*q_BSHX.shape[:3], -1)
    read = lambda cache, first, n: (*cache.read_joined(first, n, parts), None)  # noqa: E731
    y_BSHV = _attend_in_blocks(wide_BSHX, cache, keys, sinks_H, read=read, size=CPU_BLOCK)
    return jnp.where(own_HN1, y_BSHV.reshape(*y_BSHV.shape[:3], n, -1), 0).sum(3)


def _attend_in_pages(
    q_BSHX: jax.Array,
    cache: LayerCache,
    keys: KeyRange,
    sinks_H: jax.Array | None,
    *,
    kernel: Callable[..., jax.Array],
    parts: EntryParts,
) -> jax.Array:
    layer = jnp.asarray(cache.layer, jnp.int32)
    arrays = [q_BSHX, cache.entries_LZTX, layer, cache.tables_BJ, *keys, *(() if sinks_H is None else (sinks_H,))]
    arrays = match_vma(*arrays)
    with without_vma_checks() as plain:
        y_BSHV = kernel(*map(plain, arrays[:6]), parts, *map(plain, arrays[6:]))
    return pcast_varying(y_BSHV, varying_axes(arrays[0]))


def _attend_in_blocks(
    q_BSHX: jax.Array,
    cache: LayerCache,
    keys: KeyRange,
    sinks_H: jax.Array | None,
    *,
    read: ReadBlock,
    size: BlockSize,
    expanded_width: int = 0,
    all_blocks: bool = False,
) -> jax.Array:
    b, s, h, _ = q_BSHX.shape
    n_pages, page = cache.tables_BJ.shape[1], cache.entries_LZTX.shape[2]
    rows = max(r for r in range(1, max(1, min(b, size.queries // s)) + 1) if b % r == 0)
    bytes_per_key = cache.width * cache.entries_LZTX.dtype.itemsize + expanded_width * q_BSHX.dtype.itemsize + s * h * 4
    bytes_per_page = rows * page * bytes_per_key
    n = min(n_pages, max(1, size.n_bytes // bytes_per_page))
    if all_blocks:  # the same number of blocks, with less padding
        n = -(-n_pages // -(-n_pages // n))
    tables_BJ = jnp.pad(cache.tables_BJ, ((0, 0), (0, -n_pages % n)))

    def attend_rows(inputs: tuple[jax.Array, jax.Array, KeyRange]) -> jax.Array:
        q, tables, keys = inputs
        return _attend_rows(q, dataclasses.replace(cache, tables_BJ=tables), read, keys, sinks_H, n, all_blocks)

    by_rows = jax.tree.map(lambda x: x.reshape(b // rows, rows, *x.shape[1:]), (q_BSHX, tables_BJ, keys))
    y = jax.lax.map(attend_rows, by_rows)
    return y.reshape(b, *y.shape[2:])


def _attend_rows(
    q_BSHX: jax.Array,
    cache: LayerCache,
    read: ReadBlock,
    keys: KeyRange,
    sinks_H: jax.Array | None,
    n: int,
    all_blocks: bool,
) -> jax.Array:
    """`attend_cache` in blocks of n pages, which divide the pages of a row: all of them, or those with keys."""
    block = n * cache.entries_LZTX.shape[2]
    _, v_BTNV, _ = jax.eval_shape(lambda: read(cache, 0, n))
    q_BNQX = group_queries(q_BSHX, v_BTNV.shape[2])

    def add_block(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
        largest, total, y_BNQV = carry
        k_BTNX, v_BTNV, scales = read(cache, i * n, n)
        position = i * block + jnp.arange(block)
        seen_BST = (position >= keys.first_BS[..., None]) & (position <= keys.last_BS[..., None])
        scores = masked_scores(q_BNQX, k_BTNX, additive_mask(seen_BST), scales)
        new_largest = jnp.maximum(largest, scores.max(-1, keepdims=True))
        shrink, weights = jnp.exp(largest - new_largest), jnp.exp(scores - new_largest)
        total = total * shrink + weights.sum(-1, keepdims=True)
        weights = weights if scales is None else weights * scales.per_value()
        v_BNTV = v_BTNV.transpose(0, 2, 1, 3).astype(q_BSHX.dtype)
        weighted = jnp.matmul(weights.astype(v_BNTV.dtype), v_BNTV, preferred_element_type=jnp.float32)
        return new_largest, total, y_BNQV * shrink + weighted

    column = (*q_BNQX.shape[:3], 1)
    if sinks_H is None:
        largest, total = jnp.full(column, -jnp.inf), jnp.zeros(column)
    else:  # a sink is a first block of one score without a value
        sinks = group_sinks(sinks_H, q_BNQX.shape[1], q_BSHX.shape[1])
        largest, total = jnp.broadcast_to(sinks, column), jnp.ones(column)
    start = largest, total, jnp.zeros((*column[:3], v_BTNV.shape[-1]))
    start = tuple(match_vma(*start, *jax.tree.leaves((q_BSHX, cache, keys, sinks_H)))[:3])
    n_blocks, n_keys = cache.tables_BJ.shape[1] // n, keys.last_BS.max() + 1
    first = jnp.where(keys.last_BS >= 0, keys.first_BS, n_keys).min()
    bounds = (0, n_blocks) if all_blocks else (first // block, -(-n_keys // block))
    with jax.named_scope(f"{AT_MOST}{n_blocks}"):
        _, total, y_BNQV = jax.lax.fori_loop(*bounds, add_block, start)
    y_BSHV = ungroup_outputs((y_BNQV / total).astype(q_BSHX.dtype), q_BSHX.shape[2] // q_BNQX.shape[1])
    return jnp.where(keys.last_BS[..., None, None] >= 0, y_BSHV, 0)
