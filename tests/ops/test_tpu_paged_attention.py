"""The kernel for pages on TPUs, interpreted on a CPU, is attention in blocks of gathered pages."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from composer_jax.ops import tpu_paged_attention
from composer_jax.ops.cached_attention import KeyRange, LayerCache, _attend_in_pages, attend_cache
from composer_jax.ops.entry_parts import EntryParts
from composer_jax.ops.tpu_paged_attention import plan_lanes, supports
from composer_jax.scale.costs import CostAssumptions, estimate_cost

QWEN3 = EntryParts(2, (128,), 128)
"""Qwen3's heads."""
SMOLLM2 = EntryParts(3, (64,), 64)
"""SmolLM2's: three heads that begin in the middle of a vector register."""
GPT_OSS = EntryParts(4, (64,), 64)
"""gpt-oss': pairs of heads fill a register."""
MLA = EntryParts(1, (128, 64), 128, value_in_key=True)
LAYERS, PAGES = 2, 24


def entry_width(parts: EntryParts) -> int:
    return parts.n_heads * (parts.key_width + parts.value_width * (not parts.value_in_key))


def random_call(parts: EntryParts, heads: int, lengths: list[int], tokens=1, *, page=8, dtype="float32", window=None):
    """Returns queries, a cache's entries, tables of three rows' pages, and keys: the last `tokens` of each length."""
    rng = np.random.default_rng(0)
    width = entry_width(parts)
    entries = rng.standard_normal((LAYERS, len(lengths) * PAGES, page, width + -width % 128))
    entries[..., width:] = 0
    tables = rng.permutation(len(lengths) * PAGES).reshape(len(lengths), PAGES)
    q = rng.standard_normal((len(lengths), tokens, heads, parts.key_width)) * parts.key_width**-0.5
    last = np.maximum(np.array(lengths)[:, None] - tokens + np.arange(tokens), -1)
    first = np.zeros_like(last) if window is None else np.maximum(last - window + 1, 0)
    keys = KeyRange(jnp.asarray(first, jnp.int32), jnp.asarray(last, jnp.int32))
    return jnp.asarray(q, dtype), jnp.asarray(entries, dtype), jnp.asarray(tables, jnp.int32), keys


@pytest.mark.parametrize(
    ("parts", "heads", "tokens", "page", "dtype", "window", "sinks"),
    [
        (QWEN3, 8, 1, 8, "float32", None, False),
        (SMOLLM2, 9, 3, 16, "bfloat16", 40, True),
        (MLA, 6, 2, 8, "float32", None, False),
        pytest.param(GPT_OSS, 8, 2, 16, "float32", 20, True, marks=pytest.mark.slow),
        pytest.param(QWEN3, 8, 8, 16, "bfloat16", 150, False, marks=pytest.mark.slow),
        pytest.param(MLA, 6, 1, 16, "bfloat16", 33, False, marks=pytest.mark.slow),
    ],
)
def test_pages_read_by_their_numbers_equal_gathered_pages(
    parts, heads, tokens, page, dtype, window, sinks, monkeypatch
):
    """Lengths of nothing, one token, a page and one more, several blocks, and the whole table, in two layers."""
    lengths = [0, 1, page, page + 1, PAGES * page, 0, 2 * PAGES * page // 3]
    q, entries, tables, keys = random_call(parts, heads, lengths, tokens, page=page, dtype=dtype, window=window)
    chunk_bytes = 128 * entries.shape[-1] * entries.dtype.itemsize
    monkeypatch.setattr(tpu_paged_attention, "CHUNK", 128)
    monkeypatch.setattr(tpu_paged_attention, "BLOCK_BYTES", chunk_bytes * page // 8)  # one or two chunks
    # A page that no query of its row attends to is not read, so it may hold anything.
    number, rows = np.arange(PAGES), np.array(keys.last_BS).max(1, keepdims=True)
    first = np.where(np.array(keys.last_BS) >= 0, keys.first_BS, 1 << 20).min(1, keepdims=True)
    read = tables[(number >= first // page) & (number <= rows // page) & (rows >= 0)]
    poisoned = jnp.where(jnp.isin(jnp.arange(entries.shape[1]), read)[:, None, None], entries, jnp.nan)
    sinks_H = jnp.linspace(-1, 1, heads) if sinks else None

    kernel = jax.jit(
        lambda layer: tpu_paged_attention.attend(q, poisoned, layer, tables, *keys, parts, sinks_H, interpret=True)
    )
    cache = LayerCache(entries, None, 0, tables, entry_width(parts))
    oracle = jax.jit(
        lambda layer: attend_cache(q, dataclasses.replace(cache, layer=layer), parts, keys, sinks_H),
    )
    for layer in range(LAYERS):
        y, expected = (np.array(form(layer), np.float32) for form in (kernel, oracle))
        assert y.shape == (*q.shape[:3], parts.value_width)
        np.testing.assert_allclose(
            y, expected, **(dict(rtol=1e-5, atol=2e-6) if dtype == "float32" else dict(atol=8e-3))
        )
        np.testing.assert_array_equal(y[np.array(keys.last_BS) < 0], 0)
        assert np.abs(y[np.array(keys.last_BS) >= 0]).max(-1).min() > 0


@pytest.mark.slow
def test_no_buffer_is_read_before_its_copy_has_ended(monkeypatch):
    """JAX's emulation of a TPU: copies that happen as late as possible, NaN in memory, and a search for races."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    monkeypatch.setattr(tpu_paged_attention, "CHUNK", 128)
    monkeypatch.setattr(tpu_paged_attention, "BLOCK_BYTES", 1 << 18)
    q, entries, tables, keys = random_call(QWEN3, 4, [150, 0, 130, 9], 2)
    emulation = pltpu.InterpretParams(dma_execution_mode="on_wait", detect_races=True, uninitialized_memory="nan")
    y = tpu_paged_attention.attend(q, entries, 1, tables, *keys, QWEN3, interpret=emulation)
    np.testing.assert_allclose(y, attend_cache(q, LayerCache(entries, None, 1, tables, 512), QWEN3, keys), atol=1e-5)
    assert interpret_pallas_call.races is not None and not interpret_pallas_call.races.races_found


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (EntryParts(4, (128,), 128), (1, (0, 128, 256, 384), 128, (512, 640, 768, 896), 128, 0)),
        (EntryParts(4, (64,), 64), (2, (0, 128), 128, (256, 384), 128, 0)),
        (EntryParts(3, (64,), 64), (3, (0,), 256, (128,), 256, 64)),
        (EntryParts(2, (192,), 128), (2, (0,), 384, (384,), 256, 0)),
        (EntryParts(1, (512, 64), 512, value_in_key=True), (1, (0,), 640, (0,), 512, 0)),
    ],
)
def test_heads_that_share_a_register_share_a_product(parts, expected):
    assert plan_lanes(parts) == expected


def shapes(tokens=1, heads=32, page=64, width=1024, dtype="bfloat16", entry_dtype="bfloat16") -> Any:
    q = jax.ShapeDtypeStruct((4, tokens, heads, 128), dtype)
    return q, jax.ShapeDtypeStruct((2, 100, page, width), entry_dtype)


@pytest.mark.parametrize(
    ("changes", "supported"),
    [
        ({}, True),
        ({"tokens": 16}, True),
        ({"tokens": 17, "heads": 4}, False),
        ({"tokens": 8, "heads": 64}, True),
        ({"tokens": 9, "heads": 64}, False),
        ({"entry_dtype": "int8"}, False),
        ({"dtype": "float32", "entry_dtype": "float32", "page": 8}, True),
        ({"dtype": "float16", "entry_dtype": "float16"}, False),
        ({"page": 8}, False),
        ({"page": 8192, "width": 128}, False),
        ({"width": 96}, False),
        ({"width": 1 << 14}, False),
    ],
    ids=str,
)
def test_what_the_kernel_supports(changes, supported):
    assert supports(*shapes(**changes), EntryParts(4, (128,), 128)) == supported


def test_queries_that_are_widened_too_much_are_not_supported():
    assert supports(*shapes(16, 31), EntryParts(31, (64,), 64)) is False
    assert supports(*shapes(16, 32), EntryParts(32, (64,), 64)) is True


def test_plans_count_every_page_once():
    """By what a plan counts for four rows of 64 pages of 64 tokens and eight queries per head of keys."""
    parts, (q, entries) = EntryParts(4, (128,), 128), shapes()
    integers: Any = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)  # noqa: E731

    def program(q, entries, tables, keys):
        return attend_cache(q, LayerCache(entries, None, 0, tables, 1024), parts, keys)

    traced = jax.make_jaxpr(program)(q, entries, integers(4, 64), KeyRange(integers(4, 1), integers(4, 1)))
    cost = estimate_cost(traced, CostAssumptions({}))
    padded = 16  # queries of a product: eight fill half of a tile
    assert cost.flops() == cost.flops("attention") == 2 * 4 * 4 * padded * 64 * 64 * (128 + 128)
    assert cost.hbm_bytes() == pytest.approx(4 * 64 * 64 * 1024 * 2, rel=0.02)


def test_attention_types_what_varies_between_devices():
    mesh = jax.make_mesh((2,), ("data",))
    q, entries, tables, keys = random_call(QWEN3, 4, [9, 0])
    rows: Any = jax.P("data")
    pages = jax.P(None, "data")

    def program(q, entries, tables, keys):
        cache = LayerCache(entries, None, 1, tables, 512)
        kernel = functools.partial(tpu_paged_attention.attend, interpret=True)
        return attend_cache(q, cache, QWEN3, keys), _attend_in_pages(q, cache, keys, None, kernel=kernel, parts=QWEN3)

    mapped = jax.shard_map(program, mesh=mesh, in_specs=(rows, pages, rows, rows), out_specs=rows)
    placed = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec)),
        (q, entries, tables, keys),
        (rows, pages, rows, KeyRange(rows, rows)),
    )
    assert [y.shape for y in jax.eval_shape(mapped, *placed)] == [q.shape] * 2
