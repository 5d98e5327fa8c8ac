"""The Triton kernel for attention over pages: Pallas' interpreter runs it here, and JAX lowers it for CUDA."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from composer_jax.models.attention_kinds import attention_kind
from composer_jax.ops import gpu_paged_attention
from composer_jax.ops.attention import additive_mask, attend
from composer_jax.ops.cached_attention import KeyRange, LayerCache, attend_cache
from composer_jax.ops.entry_parts import EntryParts
from composer_jax.ops.gpu_paged_attention import choose_tiling
from composer_jax.ops.local_gpu import LocalGpu
from tests.models.small import GROUPED_QUERY, small
from tests.ops.triton_lowering import pretend_gpu

A100 = LocalGpu("NVIDIA A100-SXM4-80GB", (8, 0), None)
GROUPED, LATENT = EntryParts(2, (48,), 32), EntryParts(1, (32, 16), 32, value_in_key=True)
K2 = EntryParts(1, (512, 64), 512, value_in_key=True)
WIDTH, LAYERS, LAYER, PAGES = 168, 2, 1, 24  # entries are narrower than their place, 160 and 48 numbers
JS = 6


def rows_of(page: int, tokens: int, window: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns tables, first and last keys: of padding, contexts that end beside a page's border, any and a full one."""
    rng = np.random.default_rng(page)
    ends = np.array([tokens, page, page + 1, rng.integers(page, JS * page), JS * page])
    tables = rng.permutation(PAGES).repeat(2)[: 5 * JS].reshape(5, JS).astype(np.int32)
    last = np.maximum(ends[:, None] - tokens + np.arange(tokens), -1)
    first = np.zeros_like(last) if window is None else np.maximum(last - window + 1, 0)
    last[0] = -1
    return tables, first.astype(np.int32), last.astype(np.int32)


def queries_and_entries(parts: EntryParts, groups: int, page: int, tokens: int, dtype: str):
    rng = np.random.default_rng(1)
    q = rng.standard_normal((5, tokens, parts.n_heads * groups, parts.key_width)) * parts.key_width**-0.5
    return jnp.asarray(q, dtype), jnp.asarray(rng.standard_normal((LAYERS, PAGES, page, WIDTH)), dtype)


def in_order(parts: EntryParts, q, entries, tables, first, last, sinks):
    """`attend` to the keys and values of each row's pages."""
    rows = entries[LAYER][tables].reshape(len(tables), -1, WIDTH)

    def part(start: int, width: int):
        return rows[..., start : start + parts.n_heads * width].reshape(*rows.shape[:2], parts.n_heads, width)

    position = np.arange(rows.shape[1])
    bias = additive_mask(jnp.asarray((position >= first[..., None]) & (position <= last[..., None])))
    return attend(q, part(0, parts.key_width), part(parts.first_value, parts.value_width), bias, sinks)


@pytest.mark.parametrize(
    ("parts", "groups", "dtype", "page", "tokens", "window", "sinks", "blocks"),
    [
        (GROUPED, 3, "bfloat16", 64, 1, None, True, 512),
        (GROUPED, 20, "float32", 6, 1, 9, True, 1),
        (GROUPED, 12, "bfloat16", 16, 3, 20, False, 24),
        (LATENT, 40, "bfloat16", 64, 1, None, False, 512),
        (LATENT, 4, "float32", 16, 5, 7, False, 24),
    ],
    ids=str,
)
def test_the_kernel_equals_attention_in_order(parts, groups, dtype, page, tokens, window, sinks, blocks, monkeypatch):
    monkeypatch.setattr(gpu_paged_attention, "BLOCKS", blocks)
    monkeypatch.setattr(
        gpu_paged_attention, "SUMS", 1024
    )  # 32 queries of a block: GROUPED with 20 and LATENT with 40 groups
    q, entries = queries_and_entries(parts, groups, page, tokens, dtype)
    tables, first, last = rows_of(page, tokens, window)
    sinks = jnp.linspace(-1, 2, q.shape[2]) if sinks else None
    y = gpu_paged_attention.attend(q, entries, LAYER, tables, first, last, parts, sinks, interpret=True)
    expected = in_order(parts, q, entries, tables, first, last, sinks)
    tolerance = 2e-6 if dtype == "float32" else 2**-7
    assert y.dtype == q.dtype
    np.testing.assert_array_equal(y[last < 0], 0)
    real = [np.asarray(array, np.float32)[last >= 0] for array in (y, expected)]
    np.testing.assert_allclose(*real, rtol=tolerance, atol=tolerance)


def test_entries_that_no_query_attends_to_are_not_read():
    page, window = 4, 5
    q, entries = queries_and_entries(GROUPED, 2, page, 1, "float32")
    tables, first, last = rows_of(page, 1, window)
    read = np.zeros(entries.shape[:3], bool)
    for table, (start,), (end,) in zip(tables, first, last, strict=True):
        position = np.arange(start, end + 1)
        read[LAYER, table[position // page], position % page] = True
    poisoned = jnp.where(read[..., None], entries, jnp.nan)
    call = lambda entries: gpu_paged_attention.attend(  # noqa: E731
        q, entries, jnp.int32(LAYER), tables, first, last, GROUPED, interpret=True
    )
    np.testing.assert_array_equal(call(poisoned), call(entries))


def test_few_rows_are_divided_into_parts_of_their_contexts():
    q = lambda b, n, q, x: jax.ShapeDtypeStruct((b, n, q, x), jnp.bfloat16)  # noqa: E731
    entries = lambda width: jax.ShapeDtypeStruct((30, 4096, 64, width), jnp.bfloat16)  # noqa: E731
    smollm2 = EntryParts(3, (64,), 64)
    assert choose_tiling(q(64, 3, 3, 64), entries(384), 8, smollm2) == (16, 64, 3)
    assert choose_tiling(q(256, 3, 3, 64), entries(384), 8, smollm2) == (16, 64, 1)
    assert choose_tiling(q(1, 3, 3, 64), entries(384), 8, smollm2) == (16, 64, 8)
    assert choose_tiling(q(64, 1, 64, 576), entries(640), 128, K2) == (16, 16, 2)


BFLOAT16 = dict(dtype="bfloat16")


@pytest.mark.parametrize(
    ("gpu", "parts", "arrays", "supported"),
    [
        (A100, EntryParts(4, (128,), 128), BFLOAT16, True),
        (A100, K2, BFLOAT16, True),
        (A100, EntryParts(4, (128,), 128), dict(tokens=16), True),
        (A100, EntryParts(4, (128,), 128), dict(tokens=17), False),
        (A100, EntryParts(4, (128,), 128), dict(entries="int8"), False),
        (A100, EntryParts(4, (120,), 128), BFLOAT16, False),
        (A100, EntryParts(1, (576,), 576, value_in_key=True), BFLOAT16, False),
        (A100, K2, dict(), False),
        (A100._replace(kind="Tesla T4", capability=(7, 5)), EntryParts(4, (128,), 128), BFLOAT16, False),
        (None, EntryParts(4, (128,), 128), BFLOAT16, False),
    ],
)
def test_what_the_kernel_supports(gpu, parts, arrays, supported):
    dtype = arrays.get("dtype", "float32")
    q = jax.ShapeDtypeStruct((2, arrays.get("tokens", 1), 2 * parts.n_heads, parts.key_width), dtype)
    entries = jax.ShapeDtypeStruct((2, 8, 64, 1024), arrays.get("entries", dtype))
    assert gpu_paged_attention.supports(gpu, q, entries, parts) == supported


@pytest.mark.parametrize("parts", [EntryParts(4, (128,), 128), K2], ids=["grouped", "latent"])
@pytest.mark.parametrize("form", ["auto", "plain"])
def test_a_gpu_runs_the_kernel_and_copies_no_pages(parts, form, monkeypatch):
    pretend_gpu(monkeypatch, A100)
    shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype)  # noqa: E731
    h, width = 32, 1024 if parts.n_heads > 1 else 576
    cache = LayerCache(shape(48, 512, 64, width), None, shape(dtype=jnp.int32), shape(64, 16, dtype=jnp.int32), width)

    def call(q, cache, keys):
        return attend_cache(q, cache, parts, keys, form=form)

    places = shape(64, 1, dtype=jnp.int32)
    program = jax.jit(call).trace(shape(64, 1, h, parts.key_width), cache, KeyRange(places, places))
    assert program.out_info.shape == (64, 1, h, parts.value_width)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    forms = text.count("xla.gpu.triton"), len(re.findall(r"stablehlo\.(?:gather|dynamic_gather|while)\b", text))
    assert forms == (1, 0) if form == "auto" else forms[0] == 0 < forms[1]


@pytest.mark.parametrize("network", [small(**GROUPED_QUERY | dict(v_head_dim=5)), small()], ids=["grouped", "latent"])
def test_attention_kinds_say_where_their_heads_lie(network, monkeypatch):
    kind = attention_kind(network)
    attention = kind(network, rngs=nnx.Rngs(params=0))
    positions = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), (2, 3))
    x = jnp.asarray(np.random.default_rng(2).standard_normal((2, 3, network.d_model)), jnp.float32)

    def write(entries):  # in pages of a token, padded as the cache is
        pages = jnp.pad(entries, ((0, 0), (0, 0), (0, 3))).reshape(1, 6, 1, -1)
        return LayerCache(pages, None, 0, jnp.arange(6).reshape(2, 3), entries.shape[-1])

    def extend(attention, x):
        return attention.extend(x, positions, KeyRange(jnp.zeros_like(positions), positions), write)

    def interpreted(q, cache, parts, keys, sinks=None, **_):
        entries = cache.entries_LZTX, cache.layer, cache.tables_BJ
        return gpu_paged_attention.attend(q, *entries, *keys, parts, sinks, interpret=True)

    in_blocks = nnx.jit(extend)(attention, x)
    monkeypatch.setattr(inspect.getmodule(kind), "attend_cache", interpreted)
    in_pages = nnx.jit(lambda *operands: extend(*operands))(attention, x)
    np.testing.assert_allclose(in_pages, in_blocks, rtol=1e-5, atol=1e-6)
