"""Decoding with the cache equals one pass over the whole context, whatever stale entries the pages hold."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.models import cache as cache_module
from composer_jax.models.attention_kinds import attention_kind
from composer_jax.models.cache import (
    Cache,
    CachePlaces,
    abstract_cache,
    find_places,
    init_cache,
    new_cache,
    quantize,
    write_layer,
    write_routing,
)
from composer_jax.models.model_def import ModelDef
from composer_jax.models.rope import Llama3Rope
from composer_jax.parallel.mesh import make_mesh
from composer_jax.parallel.sharding import bytes_per_device
from tests.models.small import GROUPED_QUERY, LLAMA, forward, random_weights, relative_error, rows, small

CAPACITY, PAGE, PAGES = 24, 4, 14
TABLES = np.random.default_rng(5).permutation(PAGES)[:12].reshape(2, 6).astype(np.int32)
"""Pages of two contexts; two pages belong to nobody."""
LENGTHS = (19, 24)
CONTEXTS = [np.random.default_rng(i).integers(0, 64, n).tolist() for i, n in enumerate(LENGTHS)]
CONFIGS = {
    "query_rank": small(n_mtp_modules=0, q_lora_rank=12, tie_embeddings=True, n_layers=2, embedding_taps=0),
    "wide": small(n_mtp_modules=0, kv_lora_rank=131, n_layers=2),
    "grouped_query": small(n_mtp_modules=0, **GROUPED_QUERY),
    "no_experts": small(**LLAMA | {"qk_norm": True, "llama3_rope": Llama3Rope(8.0, 1.0, 4.0, 16)}),
    "experts_in_every_other_layer": small(n_mtp_modules=0, n_layers=4, n_dense_layers=0, dense_layers=(0, 2)),
}


def extender(config):
    """Jitted (params, bias, cache, tokens, start [B], count [B]) -> (logits [B,S,W], cache); rows end in padding."""

    @jax.jit
    def run(params, bias, cache, tokens, start, count):
        decoder = ModelDef(config).bind(params, bias)
        offsets = jnp.arange(tokens.shape[1])
        states, cache = decoder.extend(tokens, start[:, None] + offsets, offsets < count[:, None], cache, TABLES)
        return decoder.logits(states), cache

    return run


@pytest.fixture(scope="module", params=CONFIGS)
def model(request):
    config = CONFIGS[request.param]
    params, bias = random_weights(config)
    full = forward(config)(params, bias, rows([[c] for c in CONTEXTS], CAPACITY))["logits"]
    return config, params, bias, extender(config), np.asarray(full)


def read(model, cache, pieces, width):
    """Feeds both contexts in `pieces` (a list of lengths per row), padded to `width`; returns logits and cache."""
    _, params, bias, extend, _ = model
    actual = np.zeros((2, CAPACITY, 64), np.float32)
    start = np.zeros(2, np.int32)
    for sizes in zip(*pieces, strict=True):
        tokens = np.full((2, width), 63, np.int32)
        for b, size in enumerate(sizes):
            tokens[b, :size] = CONTEXTS[b][start[b] : start[b] + size]
        logits, cache = extend(params, bias, cache, tokens, start, np.array(sizes, np.int32))
        for b, size in enumerate(sizes):
            actual[b, start[b] : start[b] + size] = logits[b, :size]
            start[b] += size
    assert tuple(start) == LENGTHS
    return actual, cache


PIECES = [[1, 6, 0, 5, 7], [7, 0, 8, 3, 6]]


def test_single_tokens_after_a_prefill_are_the_full_forward_pass(model):
    config, params, bias, extend, full = model
    _, cache = read_first(model, init_cache(config, PAGES, PAGE), 8)
    actual = []
    for t in range(8, 19):
        tokens = np.array([[c[t]] for c in CONTEXTS], np.int32)
        logits, cache = extend(params, bias, cache, tokens, np.full(2, t, np.int32), np.ones(2, np.int32))
        actual.append(logits[:, 0])
    assert relative_error(np.stack(actual, axis=1), full[:, 8:19]) < 1e-5


def read_first(model, cache, n):
    _, params, bias, extend, _ = model
    tokens = np.array([c[:n] for c in CONTEXTS], np.int32)
    return extend(params, bias, cache, tokens, np.zeros(2, np.int32), np.full(2, n, np.int32))


def test_prefill_in_pieces_is_the_full_forward_pass_whatever_the_pages_hold(model):
    """The outputs with and without stale entries are equal bit for bit, so a page is reused without clearing."""
    clean, rng = init_cache(model[0], PAGES, PAGE), np.random.default_rng(9)
    stale = Cache(
        jnp.asarray(100 * rng.standard_normal(clean.entries_LZTX.shape), jnp.float32),
        jnp.asarray(rng.integers(0, 64, clean.tokens_ZT.shape), jnp.int32),
    )
    actual, _ = read(model, clean, PIECES, 8)
    for b, n in enumerate(LENGTHS):
        assert relative_error(actual[b, :n], model[4][b, :n]) < 1e-5
    np.testing.assert_array_equal(read(model, stale, PIECES, 8)[0], actual)


def in_order(array, axis):
    """The entries of both contexts by position: the axes Z, T become B, C."""
    array = np.moveaxis(np.asarray(array), (axis, axis + 1), (0, 1))[TABLES]
    return np.moveaxis(array.reshape(2, CAPACITY, *array.shape[3:]), (0, 1), (axis, axis + 1))


def test_padding_writes_nothing(model):
    config, params, bias, extend, _ = model
    _, before = read_first(model, init_cache(config, PAGES, PAGE), 8)
    tokens = np.full((2, 8), 5, np.int32)
    _, after = extend(params, bias, before, tokens, np.array([8, 8], np.int32), np.array([0, 3], np.int32))
    expected = in_order(before.tokens_ZT, 0)
    expected[1, 8:11] = 5
    np.testing.assert_array_equal(in_order(after.tokens_ZT, 0), expected)
    old, new = in_order(before.entries_LZTX, 1), in_order(after.entries_LZTX, 1)
    written = new[:, 1, 8:11, : sum(attention_kind(config).cache_entry(config).groups)]
    assert np.abs(written).min(axis=(1, 2)).max() > 0
    new[:, 1, 8:11] = 0
    np.testing.assert_array_equal(new, old)
    nobodys = np.setdiff1d(np.arange(PAGES), TABLES)
    assert not np.asarray(after.entries_LZTX)[:, nobodys].any()


def test_a_single_token_is_written_at_its_position_or_dropped(model):
    config, params, bias, *_ = model
    config = dataclasses.replace(config, cache_dtype="int8")
    start, counts = np.array([5, CAPACITY - 1], np.int32), np.array([0, 1], np.int32)
    cache = init_cache(config, PAGES, PAGE)
    _, after = extender(config)(params, bias, cache, np.full((2, 1), 7, np.int32), start, counts)
    for array in (after.entries_LZTX, after.scales_LZTG):
        written = np.abs(in_order(array, 1)).max(-1) > 0
        assert not written[:, 0].any() and written[:, 1, -1].all() and not written[:, 1, :-1].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_writes_of_all_platforms_are_equal(dtype):
    rng = np.random.default_rng(0)
    before = jnp.asarray(rng.integers(-99, 99, (2, 6, 8, 3)), dtype)
    new = jnp.asarray(rng.integers(-99, 99, (4, 1, 3)), dtype)
    # Two rows write into one page, the last two have no page.
    places = CachePlaces(jnp.array([[4], [4], [6], [7]], jnp.int32), jnp.array([[7], [2], [0], [0]], jnp.int32))
    expected = np.array(before)
    expected[1, 4, [7, 2]] = new[:2, 0]
    for form in (cache_module._scatter, cache_module._scatter_bits, cache_module._put_in_tiles):
        np.testing.assert_array_equal(jax.jit(form)(before, jnp.int32(1), new, places), expected)


def test_tokens_that_are_not_written_have_places_of_their_own():
    """A scatter with unique_indices may do anything with two equal places."""
    tables, real = jnp.zeros((2, 3), jnp.int32), jnp.array([[True, False], [False, False]])
    places = find_places(init_cache(small(), PAGES, PAGE), tables, jnp.array([[5, 6], [5, 6]]), real)
    assert places.page_BS[0, 0] == 0 and places.offset_BS[0, 0] == 1
    beyond = np.asarray(places.page_BS).ravel()[1:]
    assert beyond.min() >= PAGES and len(set(beyond)) == 3


@pytest.mark.parametrize("cache_dtype", ["compute", "int8"])
@pytest.mark.parametrize("length", [1, 3])
def test_a_gpu_writes_with_one_scatter_per_array(cache_dtype, length):
    config = small(n_mtp_modules=0, cache_dtype=cache_dtype, cache_routing=True, **GROUPED_QUERY)

    def write(cache, places):
        groups = attention_kind(config).cache_entry(config).groups
        new = jnp.ones((2, length, sum(groups)))
        cache, _ = write_layer(cache, jnp.int32(0), new, places, TABLES, groups)
        return write_routing(cache, jnp.ones((config.n_moe_layers, 2, length, config.experts_per_token), int), places)

    places = CachePlaces(*jnp.zeros((2, 2, length), jnp.int32))
    traced = jax.jit(write).trace(init_cache(config, PAGES, PAGE), places)
    gpu, tpu = (traced.lower(lowering_platforms=(name,)).as_text() for name in ("cuda", "tpu"))
    scatters = 2 if cache_dtype == "compute" else 3
    assert gpu.count('"stablehlo.scatter"(') == gpu.count("unique_indices = true") == scatters
    assert "stablehlo.while" not in gpu
    assert tpu.count("stablehlo.while") == (scatters if length == 1 else 0)


def test_the_cache_holds_one_latent_per_token_and_layer(model):
    config = model[0]
    cache = init_cache(config, 5, 7)
    assert cache.page_size == 7
    # Wider entries are padded to a multiple of the 128 lanes of a TPU.
    widths = {16: 16 + 4, 131: 256, None: 2 * (6 + 6)}
    assert cache.entries_LZTX.shape == (config.n_layers, 5, 7, widths[config.kv_lora_rank])
    assert init_cache(small(compute_dtype="bfloat16"), 1, 1).entries_LZTX.dtype == jnp.bfloat16


def test_a_cache_that_is_not_made_yet_has_the_bytes_of_the_one_that_is():
    """Each device pads the entry of its own heads: 76 numbers, and not half of 152, which are padded to 256."""
    config = small(**LLAMA | dict(n_kv_heads=4, qk_rope_dim=20, v_head_dim=18))
    mesh = make_mesh(jax.devices()[:4], data=2, tensor=2)
    expected, made = abstract_cache(config, mesh, 5, 7), jax.jit(new_cache(config, mesh, 5, 7))()
    assert expected.entries_LZTX.shape == made.entries_LZTX.shape == (config.n_layers, 10, 7, 2 * 76)
    assert bytes_per_device(expected) == sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(made))


@pytest.mark.parametrize(("name", "piece"), [*[(name, 4) for name in CONFIGS], ("grouped_query", 1)])
def test_an_int8_cache_is_close_and_takes_a_quarter_of_the_memory(name, piece):
    """The output is close to that of the exact cache but not equal, which an int8 cache kept in float32 would be."""
    # All experts are chosen: rounding could change a close choice, and the outputs with it.
    exact = dataclasses.replace(CONFIGS[name], experts_per_token=CONFIGS[name].n_experts)
    config = dataclasses.replace(exact, cache_dtype="int8")
    params, bias = random_weights(config)
    tokens = np.array([c[:16] for c in CONTEXTS], np.int32)
    actual, expected = [], []
    for cfg, logits in ((config, actual), (exact, expected)):
        cache, extend = init_cache(cfg, PAGES, PAGE), extender(cfg)
        for start in range(0, 16, piece):
            part, counts = tokens[:, start : start + piece], np.full(2, piece, np.int32)
            step, cache = extend(params, bias, cache, part, np.full(2, start, np.int32), counts)
            logits.append(step)
    assert 1e-6 < relative_error(np.concatenate(actual, 1), np.concatenate(expected, 1)) < 0.1
    cache = init_cache(config, PAGES, PAGE)
    assert cache.entries_LZTX.nbytes * 4 == init_cache(exact, PAGES, PAGE).entries_LZTX.nbytes


def test_quantization_error_is_at_most_half_a_step_per_group():
    groups = (5, 3)
    x = np.random.default_rng(0).standard_normal((4, 6, 8)).astype(np.float32)
    x[..., 5:] *= 100
    x[0, 0] = 0
    values, scales = quantize(jnp.asarray(x), groups)
    back = np.asarray(values) * np.repeat(np.asarray(scales), groups, axis=-1)
    assert values.dtype == jnp.int8
    for part, largest in ((slice(0, 5), np.abs(x[..., :5]).max(-1)), (slice(5, 8), np.abs(x[..., 5:]).max(-1))):
        assert (np.abs(back - x)[..., part].max(-1) <= largest / 254 * 1.001).all()
    np.testing.assert_array_equal(back[0, 0], 0)
