"""Trust regions: how much a token counts whose probability has moved away from the one that it was sampled with.

Each function maps (importance ratio, advantage, low, high) of tokens to the weight of A_t log p(x_t) in the objective.
The bounds are 1 - low and 1 + high. No gradient passes through a weight. With an unbounded region all three are
importance-weighted REINFORCE.
"""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from composer_jax.errors import UserError

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

    GLM-5, IcePop and Kimi K2.5 are this function with different widths (PUBLISHED_REGIONS, log_ratio_widths).
    """
    return jnp.where((ratio > 1 - low) & (ratio < 1 + high), ratio, 0)


def clamp(ratio: jax.Array, advantage: jax.Array, low: float, high: float) -> jax.Array:
    """Every token counts, with a ratio within the bounds.

    CISPO (MiniMax-M1, arXiv 2506.13585). With low 1 there is no lower bound, as in truncated importance
    sampling, min(r, 1 + high).
    """
    return jnp.clip(ratio, 1 - low, 1 + high)


TRUST_REGIONS: Mapping[str, TrustRegion] = {"clip": clip, "mask": mask, "clamp": clamp}
"""By the name in PolicyLossConfig.trust_region."""

PUBLISHED_REGIONS: Mapping[str, Mapping[str, str | float]] = {
    # PPO (arXiv 1707.06347, section 6.1) and DAPO (arXiv 2503.14476, section 3.1).
    "ppo": {"trust_region": "clip", "ratio_low": 0.2, "ratio_high": 0.2},
    "dapo": {"trust_region": "clip", "ratio_low": 0.2, "ratio_high": 0.28},
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


def log_ratio_widths(lowest: float, highest: float) -> dict[str, str | float]:
    """Returns values of PolicyLossConfig that trust tokens with lowest < log ratio < highest, and no other.

    Kimi K2.5's mask (arXiv 2602.02276), whose bounds alpha and beta are not published.

    Raises:
      UserError: the bounds do not enclose 0, the log-ratio of a token that has not moved.
    """
    if not lowest < 0 < highest:
        raise UserError(f"log-ratios from {lowest} to {highest} exclude 0; use a negative and a positive bound.")
    return {"trust_region": "mask", "ratio_low": -math.expm1(lowest), "ratio_high": math.expm1(highest)}
