"""Trust regions: how much a token counts whose probability has moved away from the one that it was sampled with.

Each function maps importance ratios r and advantages A of tokens to the weight of A_t log p(x_t) in the objective. No
gradient passes through a weight. With unbounded regions all three are importance-weighted REINFORCE.
"""

import math
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

    GLM-5 and IcePop are this function with different widths (PUBLISHED_REGIONS). So is Kimi K2.5's lowest < log ratio <
    highest (arXiv 2602.02276; bounds not published): ratio_low = 1 - exp(lowest), ratio_high = exp(highest) - 1.
    """
    return jnp.where((ratio > bounds.lower) & (ratio < bounds.upper), ratio, 0)


def clamp(ratio: jax.Array, advantage: jax.Array, bounds: Bounds) -> jax.Array:
    """Every token counts, with a ratio within the bounds.

    CISPO (MiniMax-M1, arXiv 2506.13585). With a lower bound of 0 it is truncated importance sampling, min(r, upper).
    """
    return jnp.clip(ratio, bounds.lower, bounds.upper)


TRUST_REGIONS: Mapping[str, TrustRegion] = {"clip": clip, "mask": mask, "clamp": clamp}
"""By the name in PolicyLossConfig.trust_region."""

PUBLISHED_REGIONS: Mapping[str, Mapping[str, str | float]] = {
    # PPO (arXiv 1707.06347, section 6.1) and DAPO (arXiv 2503.14476, section 3.1).
    "ppo": {"trust_region": "clip", "ratio_low": 0.2, "ratio_high": 0.2, "dual_clip": math.inf},
    "dapo": {"trust_region": "clip", "ratio_low": 0.2, "ratio_high": 0.28, "dual_clip": math.inf},
    # Dual-clip PPO (arXiv 1912.09729, section 4.1): epsilon = 0.2, c = 3.
    "dual_clip": {"trust_region": "clip", "ratio_low": 0.2, "ratio_high": 0.2, "dual_clip": 3.0},
    # GLM-5 (arXiv 2602.15763): the token mask of asynchronous agents; the widths are those of its reasoning RL.
    "glm5": {"trust_region": "mask", "ratio_low": 0.2, "ratio_high": 0.28},
    # IcePop (Ling team, 2025): pop(r, 1/beta, beta) with GLM-5's beta = 2.
    "icepop": {"trust_region": "mask", "ratio_low": 0.5, "ratio_high": 1.0},
    # Truncated importance sampling, min(r, C): C = 2 (Yao et al. 2025; verl's default).
    "truncated": {"trust_region": "clamp", "ratio_low": 1.0, "ratio_high": 1.0},
    # CISPO (MiniMax-M1) has no lower bound either; its upper bound is not published, and this one is DAPO's.
    "cispo": {"trust_region": "clamp", "ratio_low": 1.0, "ratio_high": 0.28},
}
"""Values of PolicyLossConfig by method, for a config file: config.rl.loss.update(PUBLISHED_REGIONS["icepop"])."""
