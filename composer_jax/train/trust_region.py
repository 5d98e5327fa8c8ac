"""Trust regions: how much a token counts whose probability has moved away from the one that it was sampled with.

Each function maps importance ratios r and advantages A of tokens to the weight of A_t log p(x_t) in the objective. No
gradient passes through a weight. With unbounded regions all three are importance-weighted REINFORCE.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Bounds(NamedTuple):
    """Importance ratios between which a token is trusted (fields of PolicyLossConfig)."""

    lower: float
    """1 - ratio_low."""
    upper: float
    """1 + ratio_high."""
    dual: float
    """dual_clip: the largest ratio with which a token of negative advantage counts in `clip`."""


TrustRegion = Callable[[jax.Array, jax.Array, Bounds], jax.Array]
"""(ratio, advantage, bounds) -> weight; arrays of one shape."""


def clip(ratio: jax.Array, advantage: jax.Array, bounds: Bounds) -> jax.Array:
    """PPO's clip (arXiv 1707.06347, equation 7): weight 0 for a token that moved far in its advantage's direction.

    A token that moved against its advantage keeps its ratio as weight, so that it can come back. That ratio has no
    bound where the advantage is negative: one token of ratio 1000 would outweigh a thousand others. So such a token
    gets weight 0 above `bounds.dual` (dual clip, arXiv 1912.09729, equation 5). These are the gradients of
    min(r A, clip(r, lower, upper) A), and of max(that, dual A) for A < 0.
    """
    is_zero_if_negative = (ratio < bounds.lower) | (ratio > bounds.dual)
    return jnp.where(jnp.where(advantage > 0, ratio > bounds.upper, is_zero_if_negative), 0, ratio)


def mask(ratio: jax.Array, advantage: jax.Array, bounds: Bounds) -> jax.Array:
    """A token outside the bounds gets weight 0, whatever the sign of its advantage.

    GLM-5 (arXiv 2602.15763), IcePop and Kimi K2.5 (arXiv 2602.02276) are this function with different widths.
    """
    return jnp.where((ratio > bounds.lower) & (ratio < bounds.upper), ratio, 0)


def clamp(ratio: jax.Array, advantage: jax.Array, bounds: Bounds) -> jax.Array:
    """Every token counts, with a ratio within the bounds.

    CISPO (MiniMax-M1, arXiv 2506.13585). With a lower bound of 0 it is truncated importance sampling, min(r, upper).
    """
    return jnp.clip(ratio, bounds.lower, bounds.upper)


TRUST_REGIONS: Mapping[str, TrustRegion] = {"clip": clip, "mask": mask, "clamp": clamp}
"""By the name in PolicyLossConfig.trust_region."""
