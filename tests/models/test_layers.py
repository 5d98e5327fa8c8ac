"""The parts of a layer, each against NumPy."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from composer_jax.models.feed_forward import FeedForward
from composer_jax.models.norm import RMSNorm
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


def test_feed_forward_is_swiglu():
    config = small()
    layer = FeedForward(config, 24, rngs=nnx.Rngs(params=0))
    x = np.random.default_rng(2).standard_normal((2, 3, config.d_model))
    weights = {name: np.asarray(getattr(layer, name).get_value(), np.float64) for name in ("gate", "up", "down")}
    assert relative_error(layer(jnp.asarray(x, jnp.float32)), reference.swiglu(weights, x)) < 1e-5
