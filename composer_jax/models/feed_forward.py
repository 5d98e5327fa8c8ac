"""SwiGLU feed-forward block."""

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from composer_jax.models.config import ModelConfig
from composer_jax.models.parameter import gather_param, matrix
from composer_jax.models.projection import project
from composer_jax.ops.activation import swiglu
from composer_jax.ops.quantized_matmul import Precision
from composer_jax.parallel.sharding import psum_tensor


class FeedForward(nnx.Module):
    """y = (silu(x W_gate) * x W_up) W_down, without biases; [..., D] -> [..., D]."""

    def __init__(self, config: ModelConfig, width: int, *, rngs: nnx.Rngs):
        d = config.d_model
        self.precision: Precision = config.precision
        self.gate = matrix(rngs, (d, width), ("embed", "ff"), config=config)
        self.up = matrix(rngs, (d, width), ("embed", "ff"), config=config)
        self.down = matrix(rngs, (width, d), ("ff", "embed"), config=config)

    def __call__(self, x: jax.Array) -> jax.Array:
        chex.assert_type(x, jnp.floating)
        gate, up, down = (gather_param(weight, x.dtype) for weight in (self.gate, self.up, self.down))
        hidden = swiglu(*(project(x, w, self.precision, sharded="out") for w in (gate, up)))
        return psum_tensor(project(hidden, down, self.precision, sharded="in"))
