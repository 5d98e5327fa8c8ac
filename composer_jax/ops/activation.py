"""Gated activations of feed-forward blocks: what becomes of the two hidden projections."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Activation = Callable[[jax.Array, jax.Array], jax.Array]


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up (Shazeer 2020, arXiv 2002.05202)."""
    return jax.nn.silu(gate) * up


def clamped_swiglu(limit: float) -> Activation:
    """gpt-oss's form (arXiv 2508.10925, section 2.3): g sigmoid(1.702 g) (u + 1), with g = min(gate, limit) and up
    clamped to -limit .. limit as u."""

    def activation(gate: jax.Array, up: jax.Array) -> jax.Array:
        gate = jnp.minimum(gate, limit)
        return gate * jax.nn.sigmoid(1.702 * gate) * (jnp.clip(up, -limit, limit) + 1)

    return activation
