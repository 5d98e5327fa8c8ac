"""Root-mean-square normalisation (Zhang & Sennrich 2019, arXiv 1910.07467)."""

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from composer_jax.models.parameter import gather_param, parameter


class RMSNorm(nnx.Module):
    """y = x / sqrt(mean(x^2) + eps) * scale, computed in float32, returned in the dtype of x."""

    def __init__(self, dim: int, *, eps: float, dtype: str):
        self.scale = parameter(jnp.ones(dim, dtype), None)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        chex.assert_type(x, jnp.floating)
        chex.assert_axis_dimension(x, -1, self.scale.get_value().shape[0])
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (wide * gather_param(self.scale, jnp.float32)).astype(x.dtype)
