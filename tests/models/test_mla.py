"""The training and decode forms of MLA agree; attend with scales, sinks and masked rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from composer_jax.errors import UserError
from composer_jax.models.mla import MultiHeadLatentAttention
from composer_jax.ops.attention import Scales, additive_mask, attend
from composer_jax.ops.cached_attention import KeyRange, LayerCache
from composer_jax.ops.packed_attention import AttentionMask
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
