"""The training and decode forms of MLA agree; attend with scales, sinks and masked rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from composer_jax.errors import UserError
from composer_jax.models.cache import quantize
from composer_jax.models.mla import MultiHeadLatentAttention
from composer_jax.ops import cached_attention
from composer_jax.ops.attention import Scales, additive_mask, attend
from composer_jax.ops.cached_attention import BlockSize, KeyRange, LayerCache
from composer_jax.ops.packed_attention import AttentionMask
from composer_jax.scale.costs import CostAssumptions, estimate_cost
from tests.models import reference
from tests.models.small import relative_error, small

RNG = np.random.default_rng(0)


def one_page(latents: jax.Array) -> LayerCache:
    """The cache of a layer in which each row has one page, which holds exactly these entries."""
    return LayerCache(latents[None], None, 0, jnp.arange(len(latents))[:, None], latents.shape[-1])


def one_document(rows: int, length: int) -> AttentionMask:
    segments = jnp.ones((rows, length), jnp.int32)
    return AttentionMask(jnp.arange(length), segments, segments)


@pytest.mark.parametrize(("q_lora_rank", "attention_scale"), [(None, 1.0), (12, 1.5)])
def test_decode_form_training_form_and_numpy_agree(q_lora_rank, attention_scale):
    config = small(q_lora_rank=q_lora_rank, attention_scale=attention_scale)
    attention = MultiHeadLatentAttention(config, rngs=nnx.Rngs(params=0))
    attention.kv_norm.scale.set_value(jnp.asarray(1 + 0.3 * RNG.standard_normal(16), jnp.float32))
    x = RNG.standard_normal((2, 7, config.d_model))
    positions = jnp.broadcast_to(jnp.arange(7), (2, 7))
    naive, absorbed = nnx.jit(
        lambda attention, x: (
            attention(x, positions, one_document(2, 7)),
            attention.extend(x, positions, KeyRange(jnp.zeros_like(positions), positions), one_page),
        )
    )(attention, jnp.asarray(x, jnp.float32))
    assert relative_error(absorbed, naive) < 1e-5
    weights = reference.to_numpy(nnx.to_pure_dict(nnx.state(attention, nnx.Param)))
    expected = np.stack([reference.attention(weights, row, config) for row in x])
    assert relative_error(naive, expected) < 1e-5


@pytest.mark.parametrize(("precision", "cache_dtype"), [("none", "compute"), ("mxfp8", "compute"), ("none", "int8")])
def test_many_tokens_expand_keys_and_values_and_give_what_the_absorbed_form_does(precision, cache_dtype, monkeypatch):
    config = small(precision=precision, cache_dtype=cache_dtype)
    attention = MultiHeadLatentAttention(config, rngs=nnx.Rngs(params=0))
    positions = jnp.broadcast_to(jnp.arange(24), (2, 24))
    x = jnp.asarray(RNG.standard_normal((2, 24, config.d_model)), jnp.float32)
    keys = KeyRange(jnp.zeros_like(positions), positions)

    def write(latents_BSX):
        if cache_dtype == "compute":
            return one_page(latents_BSX)
        values, scales = quantize(latents_BSX, attention.cache_entry(config).groups)
        return dataclasses.replace(one_page(values), scales_LZTG=scales[None])

    assert attention.expands(24)
    run = lambda: nnx.jit(lambda attention, x: attention.extend(x, positions, keys, write))(attention, x)  # noqa: E731
    expanded = run()
    monkeypatch.setattr(MultiHeadLatentAttention, "expands", lambda *_: False)
    assert relative_error(expanded, run()) < 1e-5
    training = nnx.jit(lambda attention, x: attention(x, positions, one_document(2, 24)))(attention, x)
    assert relative_error(expanded, training) < (1e-5 if cache_dtype == "compute" else 0.05)


def test_keys_and_values_are_expanded_for_a_block_of_pages_only(monkeypatch):
    config, pages, length = small(), 64, 24
    attention = MultiHeadLatentAttention(config, rngs=nnx.Rngs(params=0))
    entries = jnp.asarray(RNG.standard_normal((1, pages, 8, 20)), jnp.float32)
    positions = 8 * pages - length + jnp.arange(length)[None]
    keys = KeyRange(jnp.zeros_like(positions), positions)
    cache = LayerCache(entries, None, 0, jnp.asarray(RNG.permutation(pages))[None], 20)
    x = jnp.asarray(RNG.standard_normal((1, length, config.d_model)), jnp.float32)
    run = lambda: nnx.jit(lambda attention, x: attention.extend(x, positions, keys, lambda _: cache))  # noqa: E731
    whole = run()(attention, x)
    monkeypatch.setattr(cached_attention, "CPU_BLOCK", BlockSize(length, 1))
    # What one page expands to, and no array of a whole context but the cache.
    text = run().lower(attention, x).as_text()
    keys_of = lambda tokens: f"tensor<1x{tokens}x{config.n_heads}x{config.qk_nope_dim + config.qk_rope_dim}xf32>"  # noqa: E731
    assert keys_of(8) in text and keys_of(8 * pages) not in text
    assert relative_error(run()(attention, x), whole) < 1e-5


@pytest.mark.parametrize(("tokens", "expands"), [(157, False), (158, True)])
def test_k2_expands_as_soon_as_it_multiplies_less(tokens, expands, monkeypatch):
    """By what a plan counts for both forms against a context of 256k tokens, for two of the heads."""
    monkeypatch.setattr(cached_attention, "BLOCK", BlockSize(1 << 20, 1))  # which divides the context
    widths = dict(kv_lora_rank=512, qk_rope_dim=64, qk_nope_dim=128, v_head_dim=128, n_heads=2)
    attention = MultiHeadLatentAttention(small(**widths), rngs=nnx.Rngs(params=0))
    shape = lambda *sizes, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    cache = LayerCache(shape(1, 4096, 64, 640), None, 0, shape(1, 4096, dtype=jnp.int32), 576)
    keys = KeyRange(*[shape(1, tokens, dtype=jnp.int32)] * 2)
    operands = (*(shape(1, tokens, 2, n) for n in (128, 64)), *[shape(512, 2, 128)] * 2, cache, keys)

    def multiplications(form):
        return estimate_cost(jax.make_jaxpr(form)(*operands), CostAssumptions({})).flops() / 2 / 2 / (4096 * 64)

    absorbed, expanded = map(multiplications, (attention._attend_absorbed, attention._attend_expanded))
    assert expanded == tokens * (128 + 64 + 128) + 512 * (128 + 128)
    assert absorbed == pytest.approx(tokens * 2 * (512 + 64), rel=1e-2)  # and the queries' and outputs' projections
    assert attention.expands(tokens) == (expanded < tokens * 2 * (512 + 64)) == expands


def test_decoding_needs_the_latents_only():
    """What `extend` stores is R + P numbers per token, and a query against them alone gives the naive output."""
    config = small()
    attention = MultiHeadLatentAttention(config, rngs=nnx.Rngs(params=0))
    x = jnp.asarray(RNG.standard_normal((1, 6, config.d_model)), jnp.float32)
    positions = jnp.arange(6)[None]
    keys = KeyRange(jnp.zeros_like(positions), positions)

    @nnx.jit
    def run(attention, x):
        stored = []
        attention.extend(x, positions, keys, lambda latents: stored.append(latents) or one_page(latents))
        renew = lambda latents: one_page(stored[0].at[:, 5:].set(latents))  # noqa: E731
        last = attention.extend(x[:, 5:], positions[:, 5:], KeyRange(*(a[:, 5:] for a in keys)), renew)
        return stored[0], last, attention(x, positions, one_document(1, 6))[:, 5:]

    stored, last, expected = run(attention, x)
    assert stored.shape == (1, 6, sum(attention.cache_entry(config).groups)) == (1, 6, 20)
    assert relative_error(last, expected) < 1e-5


@pytest.mark.parametrize("sinks", [None, np.array([0.3, -1.0, 2.0, 0.0], np.float32)], ids=["plain", "sinks"])
def test_int8_keys_and_values_equal_their_scaled_numbers(sinks):
    b, s, t, h, n, widths, v_dim = 2, 3, 6, 4, 2, (5, 3), 7
    q = jnp.asarray(RNG.standard_normal((b, s, h, sum(widths))), jnp.float32)
    k, v = (jnp.asarray(RNG.integers(-127, 128, (b, t, n, width)), jnp.int8) for width in (sum(widths), v_dim))
    of_parts = [jnp.asarray(RNG.uniform(0.001, 0.02, (b, t, n)), jnp.float32) for _ in widths]
    of_values = jnp.asarray(RNG.uniform(0.001, 0.02, (b, t, n)), jnp.float32)
    mask = additive_mask(jnp.asarray(RNG.random((b, s, t)) < 0.7))
    actual = attend(q, k, v, mask, sinks, Scales(widths, tuple(of_parts), of_values))
    scale = np.repeat(np.stack(of_parts, -1), widths, axis=-1)
    expected = attend(q, k * scale, v * of_values[..., None], mask, sinks)
    assert relative_error(actual, expected) < 1e-5


def test_values_and_gradients_of_attend_are_those_of_a_plain_softmax():
    q, k = (jnp.asarray(RNG.standard_normal((2, 5, 3, 4)), jnp.float32) for _ in range(2))
    v = jnp.asarray(RNG.standard_normal((2, 5, 3, 6)), jnp.float32)
    mask = additive_mask(jnp.broadcast_to(jnp.tril(jnp.ones((5, 5), bool)), (2, 5, 5)))
    target = jnp.asarray(RNG.standard_normal((2, 5, 3, 6)), jnp.float32)

    def plain(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("bshx,bthx->bhst", q, k) + mask[:, None], axis=-1)
        return jnp.einsum("bhst,bthv->bshv", weights, v)

    def value_and_gradient(function):
        return jax.jit(jax.value_and_grad(lambda *args: (function(*args) * target).sum(), argnums=(0, 1, 2)))(q, k, v)

    actual, expected = value_and_gradient(lambda *args: attend(*args, mask)), value_and_gradient(plain)
    assert jax.tree.all(jax.tree.map(lambda f, w: relative_error(f, w) < 1e-5, actual, expected))


def test_a_query_without_visible_keys_gets_a_finite_output():
    q, k, v = (jnp.asarray(RNG.standard_normal((1, 2, 1, 4)), jnp.float32) for _ in range(3))
    actual = attend(q, k, v, additive_mask(jnp.zeros((1, 2, 2), bool)))
    np.testing.assert_allclose(actual, np.broadcast_to(v.mean(1, keepdims=True), v.shape), rtol=1e-5)


def test_heads_at_once_changes_no_value_and_no_gradient():
    """Values and every gradient, of the input and of all weights."""
    config = small(n_heads=4, q_lora_rank=12)
    x = jnp.asarray(RNG.standard_normal((2, 7, config.d_model)), jnp.float32)
    weight = jnp.asarray(RNG.standard_normal(x.shape), jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(7), (2, 7))

    def run(config):
        attention = MultiHeadLatentAttention(config, rngs=nnx.Rngs(params=0))
        graph, params = nnx.split(attention, nnx.Param)

        def objective(params, x):
            y = nnx.merge(graph, params)(x, positions, one_document(2, 7))
            return (y * weight).sum(), y

        gradients, y = jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))(params, x)
        return y, nnx.to_pure_dict(gradients[0]), gradients[1]

    expected = run(config)
    errors = jax.tree.map(relative_error, run(dataclasses.replace(config, heads_at_once=2)), expected)
    assert max(jax.tree.leaves(errors)) < 1e-5
    with pytest.raises(UserError, match="heads_at_once=3 does not divide the 4 heads"):
        run(dataclasses.replace(config, heads_at_once=3))
