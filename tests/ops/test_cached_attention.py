"""Attention against pages, block by block, is attention against the same entries in order."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.ops import cached_attention
from composer_jax.ops.attention import Scales, additive_mask, attend
from composer_jax.ops.cached_attention import BlockSize, KeyRange, LayerCache, attend_cache
from composer_jax.ops.entry_parts import EntryParts

B, S, H, N, X, V = 3, 2, 4, 2, 5, 3
PAGE, PAGES, LAYERS = 4, 16, 2
WIDTH = N * (X + V)
PARTS = EntryParts(N, (X,), V)


def split(values, scales):
    keys, values = jnp.split(values, [N * X], axis=-1)
    rows = keys.shape[:2]
    if scales is not None:
        of_keys, of_values = jnp.split(scales, 2, axis=-1)
        scales = Scales((X,), (of_keys,), of_values)
    return keys.reshape(*rows, N, X), values.reshape(*rows, N, V), scales


def read(cache, first, n):
    return split(*cache.read(first, n))


@pytest.fixture
def random_cache():
    """(tables, new_cache(dtype) -> (entries, scales)): rows of five pages, two of which share the first two."""
    rng = np.random.default_rng(0)
    tables = rng.permutation(PAGES)[:15].reshape(B, 5).astype(np.int32)
    tables[1, :2] = tables[0, :2]

    def new_cache(dtype):
        entries = rng.standard_normal((LAYERS, PAGES, PAGE, WIDTH + 2)).astype(np.float32)
        if dtype == "float32":
            return entries, None
        entries = rng.integers(-127, 128, entries.shape).astype(np.int8)
        return entries, rng.uniform(0.005, 0.02, (LAYERS, PAGES, PAGE, 2 * N)).astype(np.float32)

    return tables, new_cache


@pytest.mark.parametrize(
    ("size", "sinks", "dtype", "window"),
    [
        ((1, 1), False, "float32", None),
        ((1, 1), True, "int8", 3),
        ((1, 2), True, "float32", 7),
        ((2, 3), False, "int8", None),
        ((2, 3), True, "float32", 3),
        ((8, 1), True, "int8", None),
        ((8, 1), False, "float32", 3),
        ((8, 3), False, "int8", 7),
        ((8, 3), True, "float32", None),
        ((8, 1024), False, "float32", 7),
        ((8, 1024), True, "int8", 3),
    ],
    ids=str,
)
def test_blocks_of_rows_and_pages_equal_one_row(size, sinks, dtype, window, random_cache, monkeypatch):
    rows, pages = size
    bytes_per_page = rows * PAGE * (WIDTH * np.dtype(dtype).itemsize + S * H * 4)
    monkeypatch.setattr(cached_attention, "CPU_BLOCK", BlockSize(rows * S, pages * bytes_per_page))
    tables, new_cache = random_cache
    entries, scales = new_cache(dtype)
    rng = np.random.default_rng(1)
    q = rng.standard_normal((B, S, H, X)).astype(np.float32)
    sink = jnp.asarray(rng.standard_normal(H), jnp.float32) if sinks else None
    last = np.array([17, 6, 20])[:, None] - np.arange(S)[::-1] - 1
    first = np.zeros_like(last) if window is None else np.maximum(last - window + 1, 0)
    keys = KeyRange(jnp.asarray(first, jnp.int32), jnp.asarray(last, jnp.int32))
    position = np.arange(5 * PAGE)
    bias = additive_mask(jnp.asarray((position <= last[..., None]) & (position >= first[..., None])))

    layer_cache = lambda entries, scales, layer: LayerCache(entries, scales, layer, jnp.asarray(tables), WIDTH)  # noqa: E731

    @jax.jit
    def paged(*arrays):
        return attend_cache(q, layer_cache(*arrays), split, keys, sink)

    @jax.jit
    def joined(*arrays):
        return attend_cache(q, layer_cache(*arrays), PARTS, keys, sink)

    @jax.jit
    def on_gpu(*arrays):
        options = dict(read=read, size=cached_attention.CPU_BLOCK, all_blocks=True)
        return cached_attention._attend_in_blocks(q, layer_cache(*arrays), keys, sink, **options)

    for layer in range(LAYERS):
        row = entries[layer][tables].reshape(B, 5 * PAGE, -1)[..., :WIDTH]
        row_scales = None if scales is None else jnp.asarray(scales[layer][tables].reshape(B, 5 * PAGE, -1))
        k, v, of_row = split(jnp.asarray(row), row_scales)
        expected = attend(q, k, v, bias, sink, of_row)
        for form in (paged, joined, on_gpu):
            np.testing.assert_allclose(form(entries, scales, layer), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_pages_that_no_query_attends_to_are_not_read(sinks, random_cache, monkeypatch):
    monkeypatch.setattr(cached_attention, "CPU_BLOCK", BlockSize(S, 1))
    tables, new_cache = random_cache
    entries, _ = new_cache("float32")
    last = np.array([[7, 8], [-1, -1], [14, 15]], np.int32)
    first = np.array([[4, 5], [-1, -1], [8, 9]], np.int32)
    read = {tables[0, 1], tables[0, 2], tables[2, 2], tables[2, 3]}
    poisoned = np.where(np.isin(np.arange(PAGES), list(read))[:, None, None], entries, np.nan)
    q = np.ones((B, S, H, X), np.float32)
    sink = jnp.ones(H) if sinks else None
    of = lambda entries: attend_cache(  # noqa: E731
        q, LayerCache(entries, None, 0, jnp.asarray(tables), WIDTH), split, KeyRange(first, last), sink
    )
    np.testing.assert_array_equal(of(jnp.asarray(poisoned)), of(jnp.asarray(entries)))
    np.testing.assert_array_equal(of(jnp.asarray(poisoned))[1], 0)


@pytest.mark.parametrize("all_blocks", [False, True])
@pytest.mark.parametrize("sinks", [None, jnp.ones(H)], ids=["plain", "sinks"])
def test_padding_beside_a_context_gets_zeros(all_blocks, sinks, random_cache):
    tables, new_cache = random_cache
    entries, _ = new_cache("float32")
    last = np.array([[7], [-1], [15]], np.int32)
    options = dict(read=read, size=BlockSize(B, 1), all_blocks=all_blocks)
    cache = LayerCache(jnp.asarray(entries), None, 0, jnp.asarray(tables), WIDTH)
    q, keys = np.ones((B, 1, H, X), np.float32), KeyRange(np.zeros_like(last), last)
    y = cached_attention._attend_in_blocks(q, cache, keys, sinks, **options)
    np.testing.assert_array_equal(y[1], 0)
    assert np.abs(y[0]).min() > 0


@pytest.mark.parametrize("groups", [2, 5])
def test_a_cpu_transposes_no_keys_and_values_for_few_heads(groups, random_cache):
    """8 and 20 queries of a row; a register holds 16 numbers."""
    tables, _ = random_cache
    x = 16
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)  # noqa: E731

    last = jnp.full((B, 1), 19, jnp.int32)

    def form(q, entries, tables):
        cache = LayerCache(entries, None, 0, tables, 8 * x)
        return attend_cache(q, cache, EntryParts(4, (x,), x), KeyRange(last * 0, last))

    arrays = shape(B, 1, 4 * groups, x), shape(1, PAGES, PAGE, 8 * x), jnp.asarray(tables)
    program = jax.jit(form).lower(*arrays).compile().as_text()
    moved = re.findall(r"f32\[([\d,]+)\]\S* (?:transpose|copy)\(", program)
    largest = max((math.prod(map(int, dims.split(","))) for dims in moved), default=0)
    all_keys = B * 5 * PAGE * 4 * x
    assert (largest >= all_keys) == (groups == 5)
