"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), pairs interleaved as in DeepSeek's code."""

import jax
import jax.numpy as jnp


def rope_angles(positions: jax.Array, dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position * theta^(-2i/dim), each [..., dim/2] float32, for integer positions [...]."""
    frequency = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angle = positions[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (x_2i, x_2i+1) of the last dimension; cos and sin broadcast against [..., dim/2]."""
    even, odd = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)
