"""The parts of a layer, each against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from composer_jax.models.feed_forward import FeedForward
from composer_jax.models.norm import RMSNorm
from composer_jax.models.rope import rope_angles, rotate
from tests.models import reference
from tests.models.small import relative_error, small


def test_rms_norm_is_the_formula():
    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal((3, 5, 8)), rng.standard_normal(8)
    norm = RMSNorm(8, eps=0.1, dtype="float32")
    norm.scale.set_value(jnp.asarray(scale, jnp.float32))
    actual = norm(jnp.asarray(x, jnp.float32))
    assert relative_error(actual, reference.rms_norm(x, scale, 0.1)) < 1e-6


def test_rms_norm_computes_in_float32_and_returns_the_dtype_it_got():
    # 300^2 * 8 is beyond what float16 can hold.
    actual = RMSNorm(8, eps=0.0, dtype="float32")(jnp.full((1, 8), 300, jnp.float16))
    assert actual.dtype == jnp.float16
    np.testing.assert_array_equal(np.asarray(actual), np.ones((1, 8)))


def test_rope_turns_pairs_like_complex_numbers():
    x = np.random.default_rng(1).standard_normal((4, 6))
    positions = np.array([0, 1, 7, 500])
    actual = rotate(jnp.asarray(x, jnp.float32), *rope_angles(jnp.asarray(positions), 6, 100.0))
    expected = np.stack([reference.rotate(row, position, 100.0) for row, position in zip(x, positions, strict=True)])
    assert relative_error(actual, expected) < 1e-5
    np.testing.assert_array_equal(np.asarray(actual[0]), np.asarray(x[0], np.float32))


def test_rope_products_depend_on_the_distance_only():
    q, k = jax.random.normal(jax.random.key(0), (2, 8))

    def product(query_at, key_at):
        cos, sin = rope_angles(jnp.array([query_at, key_at]), 8, 10_000.0)
        return float(rotate(q, cos[0], sin[0]) @ rotate(k, cos[1], sin[1]))

    assert product(40, 33) == pytest.approx(product(7, 0), abs=1e-5)
    assert product(40, 33) != pytest.approx(product(33, 40), abs=1e-3)


def test_feed_forward_is_swiglu():
    config = small()
    layer = FeedForward(config, 24, rngs=nnx.Rngs(params=0))
    x = np.random.default_rng(2).standard_normal((2, 3, config.d_model))
    weights = {name: np.asarray(getattr(layer, name).get_value(), np.float64) for name in ("gate", "up", "down")}
    assert relative_error(layer(jnp.asarray(x, jnp.float32)), reference.swiglu(weights, x)) < 1e-5
