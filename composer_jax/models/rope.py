"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), and its rescaling by YaRN and by Llama 3."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al. 2023, arXiv 2309.00071) with DeepSeek's rules for the temperature of attention.

    Pairs that turn more than beta_fast times within the original context keep their frequency, those that turn less
    than beta_slow times are slowed down by `factor`, with a linear ramp between (section 3.2, equations 17 to 23).
    Defaults are those of DeepSeek-V3's config.json.
    """

    factor: float
    """Ratio of the longest context to the original one (DeepSeek-V3: 40, K2: 32, K2.5: 64)."""
    original_context: int = 4096
    """Context length of pretraining, in tokens."""
    beta_fast: float = 32.0
    """Turns within the original context above which a pair keeps its frequency."""
    beta_slow: float = 1.0
    """Turns within the original context below which a pair is slowed down by the whole factor."""
    mscale: float = 1.0
    """DeepSeek's first scale: its temperature over that of mscale_all_dim multiplies cos and sin."""
    mscale_all_dim: float = 1.0
    """DeepSeek's second scale: its squared temperature multiplies the attention logits."""
    truncate: bool = True
    """Rounds the ends of the ramp to whole pairs (gpt-oss: False)."""

    def __post_init__(self):
        if self.factor < 1:
            raise UserError(f"yarn.factor={self.factor} shortens the context; use 1 or more.")
        if self.original_context < 1:
            raise UserError(f"yarn.original_context={self.original_context} is a number of tokens; use 1 or more.")
        if not 0 < self.beta_slow <= self.beta_fast:
            raise UserError(f"yarn needs 0 < beta_slow={self.beta_slow} <= beta_fast={self.beta_fast}; use 1 and 32.")

    def frequencies(self, dim: int, theta: float) -> np.ndarray:
        """Returns the radians per token of each pair, float32 [dim/2]."""

        def pair_with(turns: float) -> float:
            """Returns the fractional index of the pair that turns `turns` times in the original context."""
            return dim * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = (np.arange(dim // 2, dtype=np.float32) - low) / (high - low if high != low else 1e-3)
        slowed = np.clip(ramp, 0, 1)
        plain = plain_frequencies(dim, theta)
        return (plain * (1 - slowed) + plain / self.factor * slowed).astype(np.float32)

    @property
    def rotation_scale(self) -> float:
        """Factor on cos and sin."""
        return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)

    @property
    def logit_scale(self) -> float:
        """Factor on the attention logits: m^2, m = 0.1 mscale_all_dim ln(factor) + 1."""
        return self._temperature(self.mscale_all_dim) ** 2

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's rescaled frequencies (as in transformers' modeling_rope_utils.py, rope_type "llama3").

    Pairs that turn at least high_freq_factor times within the original context keep their frequency, those that turn at
    most low_freq_factor times are slowed down by `factor`, with a linear ramp in the number of turns between. Attention
    has no temperature. Defaults are those of Llama 3.1's config.json.
    """

    factor: float
    """Ratio of the longest context to the one that slow pairs were trained on (Llama 3.1: 8; 3.2: 32)."""
    low_freq_factor: float = 1.0
    """Turns within the original context up to which a pair is slowed down by the whole factor."""
    high_freq_factor: float = 4.0
    """Turns within the original context from which a pair keeps its frequency."""
    original_context: int = 8192
    """Context length of pretraining, in tokens."""

    rotation_scale = 1.0
    """Factor on cos and sin."""
    logit_scale = 1.0
    """Factor on the attention logits."""

    def __post_init__(self):
        if self.factor < 1:
            raise UserError(f"llama3_rope.factor={self.factor} shortens the context; use 1 or more.")
        if self.original_context < 1:
            raise UserError(f"llama3_rope.original_context={self.original_context} is a number of tokens; use 8192.")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise UserError(
                f"llama3_rope needs 0 < low_freq_factor={self.low_freq_factor} < "
                f"high_freq_factor={self.high_freq_factor}; use 1 and 4."
            )

    def frequencies(self, dim: int, theta: float) -> np.ndarray:
        """Returns the radians per token of each pair, float32 [dim/2], rounded as in PyTorch."""
        plain = plain_frequencies(dim, theta)
        turns = np.float32(self.original_context) / (np.float32(2 * math.pi) / plain)
        kept = (turns - np.float32(self.low_freq_factor)) / np.float32(self.high_freq_factor - self.low_freq_factor)
        kept, factor = np.clip(kept, 0, 1), np.float32(self.factor)
        return (1 - kept) * plain / factor + kept * plain


RopeScaling = Yarn | Llama3Rope
"""Rescaled frequencies, with their factors on cos and sin and on the attention logits."""


def plain_frequencies(dim: int, theta: float) -> np.ndarray:
    """Returns the radians per token of each pair, theta^(-2i/dim), float32 [dim/2].

    They are rounded as in PyTorch, in which published models were trained: the exponent, the power and its reciprocal.
    An angle is thousands of times the frequency, so that another last bit moves logits at position 2,000 by 1e-3.
    """
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers = np.float64(theta) ** exponents.astype(np.float64)
    return np.float32(1) / powers.astype(np.float32)


def rope_angles(
    positions: jax.Array, dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin of position times frequency, each float32 [..., dim/2], for integer positions [...]."""
    chex.assert_type(positions, jnp.integer)
    frequency, scale = plain_frequencies(dim, theta), 1.0
    if scaling is not None:
        frequency, scale = scaling.frequencies(dim, theta), scaling.rotation_scale
    angle = positions[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, halves: bool = False) -> jax.Array:
    """Rotates pairs of the last dimension P; cos and sin broadcast against [..., P/2].

    A pair is (x_2i, x_2i+1), or with `halves` (x_i, x_i+P/2); the weights decide which.
    """
    chex.assert_type([x, cos, sin], jnp.floating)
    chex.assert_axis_dimension(cos, -1, x.shape[-1] // 2)
    if halves:
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1).astype(x.dtype)
    even, odd = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)
