"""Gated activations of feed-forward blocks: from the gate and up projections to the hidden values."""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

Activation = Callable[[jax.Array, jax.Array], jax.Array]
"""(gate, up), equal in shape and floating dtype -> hidden values of that shape and dtype."""


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns silu(gate) * up (Shazeer 2020, arXiv 2002.05202)."""
    _check(gate, up)
    return jax.nn.silu(gate) * up


def clamped_swiglu(limit: float) -> Activation:
    """Returns gpt-oss's activation (arXiv 2508.10925, section 2.3): g sigmoid(1.702 g) (u + 1).

    g is the gate clamped from above to `limit`, u is up clamped to -limit .. limit.
    """

    def activation(gate: jax.Array, up: jax.Array) -> jax.Array:
        _check(gate, up)
        gate = jnp.minimum(gate, limit)
        return gate * jax.nn.sigmoid(1.702 * gate) * (jnp.clip(up, -limit, limit) + 1)

    return activation


def _check(gate: jax.Array, up: jax.Array) -> None:
    chex.assert_equal_shape([gate, up])
    chex.assert_type([gate, up], jnp.floating)
