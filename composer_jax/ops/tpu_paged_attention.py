"""Attention of a few new tokens per row over a paged cache, by a Pallas kernel for TPUs that copies no page in HBM.

A page goes from HBM straight into VMEM, by its number in the row's page table. While a block of pages is computed, the
next one is copied, at the end of a row the first one of the next row. The softmax is that of ops/cached_attention.py.

The kernel is ours because those of JAX (0.10.2 and 0.11.2) read other caches: ragged_paged_attention [Z,T,2N,X], where
keys and values alternate, and paged_attention one [N,Z,T,X] for keys and one for values. In our [L,Z,T,X] an entry's
keys lie before its values, so both would rearrange a layer's whole cache for every new token. Neither has sinks, a
window that is known on the device only, or values that are a part of the keys (MLA).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.ops.attention import MASKED, group_sinks
from composer_jax.ops.entry_parts import EntryParts
from composer_jax.ops.kernel_cost import KernelCall, KernelCost, array_bytes, kernel_cost
from composer_jax.ops.matmul import float32_sum_precision
from composer_jax.ops.shapes import check_shapes

LANES = 128
MOST_TOKENS, MOST_QUERIES, MOST_NUMBERS = 16, 512, 512 * (640 + 512)
"""New tokens of a row, their queries over all heads, and the numbers of these and of their sums in VMEM, at most: eight
tokens of Kimi K2, which has 64 heads."""
BLOCK_BYTES = 2 << 20
"""Bytes of a block of pages, at most: large enough to hide the latency of its copy. Two blocks are in VMEM."""
CHUNK = 512
"""Keys of a block that are multiplied at once, or more where a page has more, or the pages that LANES divides together
have: the last chunk of a row is computed whole."""


def supports(q_BSHX: jax.Array, entries_LZTX: jax.Array, parts: EntryParts) -> bool:
    """Returns whether the kernel takes these queries and entries.

    It takes bfloat16 and float32, one of them for both; entries whose width LANES divides, without scales; pages of
    whole tiles of VMEM; rows of few tokens and queries; and pages and entries of which a block holds a
    chunk of moderate size.
    """
    (_, s, h, _), (*_, page, width), dtype = q_BSHX.shape, entries_LZTX.shape, entries_LZTX.dtype
    if dtype != q_BSHX.dtype or dtype not in (jnp.bfloat16, jnp.float32):
        return False
    if width % LANES or page % sublanes(dtype) or s > MOST_TOKENS or s * h > MOST_QUERIES:
        return False
    lanes = plan_lanes(parts)
    if s * h * (lanes.key_width + lanes.value_width) > MOST_NUMBERS:
        return False
    return 0 < _plan_pages(page, width * dtype.itemsize, 1).chunk * page <= 8 * CHUNK


class Lanes(NamedTuple):
    """Which numbers of an entry one product reads: those of a few heads, rounded outwards to whole LANES."""

    heads: int
    """Heads of keys and values that share a product; a query is zero where another head's key lies."""
    keys: tuple[int, ...]
    """First lane of the keys in each product."""
    key_width: int
    values: tuple[int, ...]
    value_width: int
    value_offset: int
    """Where the first head's value begins, counted from the first lane of the values."""


def plan_lanes(parts: EntryParts) -> Lanes:
    """Returns the products of the fewest heads whose keys and values begin and end at multiples of LANES, or of all."""
    n, x, v, first = parts.n_heads, parts.key_width, parts.value_width, parts.first_value
    is_aligned = lambda heads: not any(width % LANES for width in (heads * x, heads * v, first))  # noqa: E731
    heads = next((heads for heads in range(1, n) if n % heads == 0 and is_aligned(heads)), n)
    begin, groups = first // LANES * LANES, range(0, n, heads)
    value_width = _round_up(first + heads * v, LANES) - begin
    keys, values = tuple(i * x for i in groups), tuple(begin + i * v for i in groups)
    return Lanes(heads, keys, _round_up(heads * x, LANES), values, value_width, first - begin)


class Pages(NamedTuple):
    """How many pages are copied and multiplied at once."""

    size: int
    """Tokens of a page."""
    chunk: int
    """Pages that are multiplied at once, whose tokens are a multiple of LANES; 0 where a block holds no chunk."""
    block: int
    """Pages that are copied at once, a multiple of those of a chunk."""


def _plan_pages(size: int, bytes_per_token: int, most: int) -> Pages:
    """Returns the largest chunk and block for tables of `most` pages."""
    least, fitting = LANES // math.gcd(size, LANES), BLOCK_BYTES // (size * bytes_per_token)
    chunk = min(fitting, max(least, CHUNK // size), _round_up(most, least)) // least * least
    return Pages(size, chunk, chunk and min(fitting, _round_up(most, chunk)) // chunk * chunk)


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
    interpret: Any = False,
) -> jax.Array:
    """Returns the same as ops/cached_attention.py: attend_cache, [B,S,H,V], for operands it `supports`.

    Args:
      first_BS, last_BS: the fields of a KeyRange.
      interpret: True or JAX's InterpretParams interpret the kernel's program, for tests without a TPU (slow).
    """
    check_shapes(
        q_BSHX=(q_BSHX, jnp.floating),
        tables_BJ=(tables_BJ, jnp.int32),
        first_BS=(first_BS, jnp.int32),
        last_BS=(last_BS, jnp.int32),
        sinks_H=(sinks_H, jnp.float32),
    )
    layer = jnp.asarray(layer, jnp.int32)
    return _attend(q_BSHX, entries_LZTX, layer, tables_BJ, first_BS, last_BS, parts, sinks_H, interpret=interpret)


def _attend(q_BSHX, entries_LZTX, layer, tables_BJ, first_BS, last_BS, parts, sinks_H, *, interpret):
    # Imported here: importing Pallas takes half a second, and small networks' entries do not need it.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (b, s, h, _), (*_, page, width), dtype = q_BSHX.shape, entries_LZTX.shape, entries_LZTX.dtype
    lanes = plan_lanes(parts)
    q_BNQX = _group_queries(q_BSHX, lanes)
    _, n, rows, _ = q_BNQX.shape
    pages = _plan_pages(page, width * dtype.itemsize, tables_BJ.shape[1])
    end_B = last_BS.max(1) // page + 1  # 0 where no query has keys
    begin_B = jnp.minimum(jnp.where(last_BS >= 0, first_BS, jnp.iinfo(jnp.int32).max).min(1) // page, end_B)
    scalars = layer.reshape(1), begin_B, end_B, first_BS.reshape(-1), last_BS.reshape(-1)

    cores = 2 if b % 2 == 0 else 1
    row = lambda core, i: core * (b // cores) + i  # noqa: E731
    by_row = lambda *shape: pl.BlockSpec((1, *shape), lambda core, i, *_: (row(core, i), 0, 0, 0))  # noqa: E731
    table = lambda ahead: pl.BlockSpec(  # noqa: E731
        (1, 1, tables_BJ.shape[1]),
        lambda core, i, *_: (jnp.minimum(row(core, i) + ahead, b - 1), 0, 0),
        memory_space=pltpu.SMEM,
    )
    in_specs = [table(0), table(1), by_row(n, rows, lanes.key_width), pl.BlockSpec(memory_space=pl.ANY)]
    operands = [tables_BJ[:, None], tables_BJ[:, None], q_BNQX, entries_LZTX]
    if sinks_H is not None:
        in_specs.append(pl.BlockSpec((n, rows, 1), lambda *_: (0, 0, 0)))
        operands.append(jnp.pad(group_sinks(sinks_H, n, s), ((0, 0), (0, rows - s * h // n), (0, 0))))
    out = jax.ShapeDtypeStruct((b, n, rows, lanes.value_width), dtype)
    _, flops, read = _full_tables_cost(operands[0], q_BNQX, entries_LZTX, out)
    scores = flops / (2 * (lanes.key_width + lanes.value_width))
    y_BNQV = pl.pallas_call(
        functools.partial(_attend_row, new_tokens=s, heads=h // n, lanes=lanes, pages=pages),
        out_shape=out,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(cores, b // cores),
            in_specs=in_specs,
            out_specs=by_row(n, rows, lanes.value_width),
            scratch_shapes=[
                pltpu.VMEM((2, pages.block * page, width), dtype),
                *[pltpu.VMEM((n, rows, 1), jnp.float32)] * 2,
                pltpu.VMEM((n, rows, lanes.value_width), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        # The two cores of a v4 or v5p are one device and divide the first axis.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=int(flops), bytes_accessed=int(read), transcendentals=int(scores)),
        interpret=interpret,
        name="paged_attention",
    )(*scalars, *operands)
    return _ungroup_outputs(y_BNQV, s, h, lanes, parts)


def _attend_row(
    layer_ref, begin_ref, end_ref, first_ref, last_ref, table_ref, next_table_ref, q_ref, entries_ref, *refs,
    new_tokens, heads, lanes, pages,
):  # fmt: skip
    """The kernel's program for one row."""
    from jax.experimental import pallas as pl

    *sinks_refs, y_ref, buffers_ref, largest_ref, total_ref, sum_ref, buffer_ref, semaphores_ref = refs
    i, n_rows = pl.program_id(1), pl.num_programs(1)
    row = pl.program_id(0) * n_rows + i
    begin, end = begin_ref[row], end_ref[row]
    n_blocks = pl.cdiv(end - begin, pages.block)
    block = _BlockCopy(entries_ref, layer_ref, buffers_ref, semaphores_ref, pages)

    @pl.when(i == 0)
    def _():
        buffer_ref[0] = 0
        block.start(table_ref, begin, end, 0)

    def start_next_row(buffer):
        @pl.when(i + 1 < n_rows)
        def _():
            block.start(next_table_ref, begin_ref[row + 1], end_ref[row + 1], buffer)

    if sinks_refs:  # a sink is a first block of one score without a value
        largest_ref[...] = sinks_refs[0][...]
        total_ref[...] = jnp.ones_like(total_ref)
    else:
        largest_ref[...] = jnp.full_like(largest_ref, -jnp.inf)
        total_ref[...] = jnp.zeros_like(total_ref)
    sum_ref[...] = jnp.zeros_like(sum_ref)
    first, last = (_per_query(ref, row, new_tokens, heads, q_ref.shape[2]) for ref in (first_ref, last_ref))

    def add_block(number, buffer):
        here = begin + number * pages.block
        pl.when(number + 1 < n_blocks)(lambda: block.start(table_ref, here + pages.block, end, 1 - buffer))
        pl.when(number + 1 == n_blocks)(lambda: start_next_row(1 - buffer))
        n_chunks = block.wait(table_ref, here, end, buffer)

        def add_chunk(i, _):
            position = here * pages.size + i * size + jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
            seen = (position >= first) & (position <= last)
            keys_ref = buffers_ref.at[buffer, pl.ds(pl.multiple_of(i * size, size), size)]
            for group in range(q_ref.shape[1]):
                _add_keys(group, lanes, q_ref, keys_ref, seen, largest_ref, total_ref, sum_ref)

        size = pages.chunk * pages.size
        jax.lax.fori_loop(0, n_chunks, add_chunk, None)
        return 1 - buffer

    buffer_ref[0] = jax.lax.fori_loop(0, n_blocks, add_block, buffer_ref[0])
    pl.when(n_blocks == 0)(lambda: start_next_row(buffer_ref[0]))
    y_ref[0] = jnp.where(last >= 0, sum_ref[...] / total_ref[...], 0).astype(y_ref.dtype)


class _BlockCopy(NamedTuple):
    """Copies of the pages of a block from HBM into one of two buffers."""

    entries_ref: Any
    layer_ref: Any
    buffers_ref: Any
    semaphores_ref: Any
    pages: Pages

    def start(self, table_ref, first, end, buffer) -> None:
        """Starts to copy a row's pages from `first` on, a block of them or up to the last one, `end` - 1."""

        def start_page(place, _):
            self._copy(table_ref, first + place, place, buffer).start()

        jax.lax.fori_loop(0, jnp.minimum(self.pages.block, end - first), start_page, None)

    def wait(self, table_ref, first, end, buffer):
        """Waits for what `start` copies, and returns the number of its chunks.

        Zeros fill the chunk of the row's last page: old memory may hold a NaN.
        """
        from jax.experimental import pallas as pl

        def wait_page(place, _):
            self._copy(table_ref, first + place, place, buffer).wait()

        def zero_page(place, _):
            shape = self.pages.size, self.buffers_ref.shape[-1]
            self.buffers_ref[buffer, self._tokens(place)] = jnp.zeros(shape, self.buffers_ref.dtype)

        count = jnp.minimum(self.pages.block, end - first)
        n_chunks = pl.cdiv(count, self.pages.chunk)
        jax.lax.fori_loop(0, count, wait_page, None)
        jax.lax.fori_loop(count, n_chunks * self.pages.chunk, zero_page, None)
        return n_chunks

    def _copy(self, table_ref, number, place, buffer):
        from jax.experimental.pallas import tpu as pltpu

        page_ref = self.entries_ref.at[self.layer_ref[0], table_ref[0, 0, number]]
        to_ref = self.buffers_ref.at[buffer, self._tokens(place)]
        return pltpu.make_async_copy(page_ref, to_ref, self.semaphores_ref.at[buffer])

    def _tokens(self, place):
        from jax.experimental import pallas as pl

        return pl.ds(pl.multiple_of(place * self.pages.size, self.pages.size), self.pages.size)


def _per_query(ref, row, new_tokens: int, heads: int, n: int) -> jax.Array:
    """Returns a scalar of each new token of a row for each of n queries, `heads` of a token, int32 [n,1]."""
    query = jax.lax.broadcasted_iota(jnp.int32, (n, 1), 0)
    values = jnp.full((n, 1), ref[row * new_tokens], jnp.int32)
    for token in range(1, new_tokens):
        values = jnp.where(query >= token * heads, ref[row * new_tokens + token], values)
    return values


def _add_keys(group: int, lanes: Lanes, q_ref, keys_ref, seen, largest_ref, total_ref, sum_ref) -> None:
    """Adds a chunk of keys to the running maximum and sums of the heads of one product."""
    from jax.experimental import pallas as pl

    q, k = q_ref[0, group], keys_ref[:, pl.ds(lanes.keys[group], lanes.key_width)]
    how: Any = dict(precision=float32_sum_precision(q.dtype), preferred_element_type=jnp.float32)
    scores = jnp.where(seen, jax.lax.dot_general(q, k, (((1,), (1,)), ((), ())), **how), MASKED)
    largest = jnp.maximum(largest_ref[group], scores.max(1, keepdims=True))
    shrink, weights = jnp.exp(largest_ref[group] - largest), jnp.exp(scores - largest)
    v = keys_ref[:, pl.ds(lanes.values[group], lanes.value_width)]
    largest_ref[group] = largest
    total_ref[group] = total_ref[group] * shrink + weights.sum(1, keepdims=True)
    sum_ref[group] = sum_ref[group] * shrink + jnp.dot(weights.astype(v.dtype), v, **how)


def _group_queries(q_BSHX: jax.Array, lanes: Lanes) -> jax.Array:
    """Returns the queries of each product, [B,N,Q,X]: token by token, each zero beyond the lanes of its head's key."""
    b, s, h, x = q_BSHX.shape
    n = len(lanes.keys)
    heads = q_BSHX.reshape(b, s, n, lanes.heads, -1, x).transpose(0, 2, 1, 3, 4, 5)  # [B,N,S,heads,H/heads/N,X]
    of_head = lambda i: jnp.pad(heads[:, :, :, i], ((0, 0),) * 4 + ((i * x, lanes.key_width - (i + 1) * x),))  # noqa: E731
    q_BNQX = jnp.stack([of_head(i) for i in range(lanes.heads)], axis=3).reshape(b, n, -1, lanes.key_width)
    return jnp.pad(q_BNQX, ((0, 0), (0, 0), (0, -q_BNQX.shape[2] % sublanes(q_BSHX.dtype)), (0, 0)))


def _ungroup_outputs(y_BNQV: jax.Array, s: int, h: int, lanes: Lanes, parts: EntryParts) -> jax.Array:
    """Returns the outputs of the products' queries in their own order, each from its head's lanes, [B,S,H,V]."""
    b, n, _, width = y_BNQV.shape
    y = y_BNQV[:, :, : s * h // n].reshape(b, n, s, lanes.heads, -1, width)
    of_head = lambda i: lanes.value_offset + i * parts.value_width  # noqa: E731
    cut = [y[:, :, :, i, :, of_head(i) : of_head(i) + parts.value_width] for i in range(lanes.heads)]
    return jnp.stack(cut, axis=3).transpose(0, 2, 1, 3, 4, 5).reshape(b, s, h, parts.value_width)


def sublanes(dtype) -> int:
    """Returns the rows of a tile in VMEM."""
    return 32 // dtype.itemsize


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@kernel_cost("paged_attention")
def _cost(call: KernelCall) -> KernelCost:
    # A compiled program lacks the operands of one axis.
    tables = next(a for a in call.inputs if a.ndim == 3 and jnp.issubdtype(a.dtype, jnp.integer))
    q, entries = (a for a in call.inputs if a.ndim == 4)
    return _full_tables_cost(tables, q, entries, call.outputs[0])


def _full_tables_cost(tables, q, entries, y) -> KernelCost:
    """Cost where every row has as many pages as its table: a page is read once and multiplied with all queries."""
    (rows, _, n_pages), (*_, page, width) = tables.shape, entries.shape
    keys = n_pages * page
    read = rows * keys * width * entries.dtype.itemsize
    return KernelCost("attention", 2.0 * keys * (q.size + y.size), read + array_bytes(tables, q, y))
