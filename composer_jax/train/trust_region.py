"""Trust regions: how much a token counts whose probability has moved away from the one that it was sampled with.

Each function maps (importance ratio, advantage, low, high) of tokens to the weight of A_t log p(x_t) in the objective.
The bounds are 1 - low and 1 + high. No gradient passes through a weight. With an unbounded region all three are
importance-weighted REINFORCE.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

TrustRegion = Callable[[jax.Array, jax.Array, float, float], jax.Array]
"""(ratio, advantage, low, high) -> weight; arrays of one shape."""


def clip(ratio: jax.Array, advantage: jax.Array, low: float, high: float) -> jax.Array:
    """PPO's clip (arXiv 1707.06347, equation 7): a token that has moved far in the direction of its advantage rests.

    These are the gradients of min(r A, clip(r, 1 - low, 1 + high) A). A token that moved against its advantage goes on
    with its ratio, so that it can come back. Widths of DAPO (arXiv 2503.14476): 0.2 and 0.28.
    """
    has_moved = jnp.where(advantage > 0, ratio > 1 + high, ratio < 1 - low)
    return jnp.where(has_moved, 0, ratio)


def mask(ratio: jax.Array, advantage: jax.Array, low: float, high: float) -> jax.Array:
    """A token outside the bounds rests, whatever the sign of its advantage.

    GLM-5's token mask for asynchronous agents (with the widths of `clip`), IcePop (bounds 1/b and b, with
    b = 2: low 0.5 and high 1) and Kimi K2.5's mask of log-ratios (bounds e^alpha and e^beta) are this function with
    different widths.
    """
    return jnp.where((ratio > 1 - low) & (ratio < 1 + high), ratio, 0)


def clamp(ratio: jax.Array, advantage: jax.Array, low: float, high: float) -> jax.Array:
    """Every token counts, with a ratio within the bounds.

    CISPO (MiniMax-M1, arXiv 2506.13585); with low 1 truncated importance sampling, min(r, 1 + high).
    """
    return jnp.clip(ratio, 1 - low, 1 + high)


TRUST_REGIONS: Mapping[str, TrustRegion] = {"clip": clip, "mask": mask, "clamp": clamp}
"""By the name in PolicyLossConfig.trust_region."""
