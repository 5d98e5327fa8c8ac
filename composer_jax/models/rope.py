"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and YaRN."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al. 2023, arXiv 2309.00071) with DeepSeek's rules for the temperature of attention.

    Pairs that turn more than beta_fast times within the original context keep their frequency, those that turn less
    than beta_slow times are slowed down by `factor`, a linear ramp lies between (section 3.2, equations 17 to 23).
    Defaults are DeepSeek-V3's (config.json: factor 40) and gpt-oss's.
    """

    factor: float
    """Longest context over the original one (K2: 32, K2.5: 64)."""
    original_context: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0
    """DeepSeek's two scales: the second sharpens all logits, the first over the second multiplies cos and sin."""
    truncate: bool = True
    """Whether the ends of the ramp are rounded to whole pairs (gpt-oss: no)."""

    def __post_init__(self):
        if self.factor < 1:
            raise UserError(f"yarn.factor={self.factor} would shorten the context; use 1 or more.")
        if self.original_context < 1:
            raise UserError(f"yarn.original_context={self.original_context} must be a positive number of tokens.")
        if not 0 < self.beta_slow <= self.beta_fast:
            raise UserError(f"yarn needs 0 < beta_slow={self.beta_slow} <= beta_fast={self.beta_fast}.")

    def frequencies(self, dim: int, theta: float) -> np.ndarray:
        """float32 [dim/2]: radians per token of each pair."""

        def pair_with(turns: float) -> float:
            """The pair, a fractional number, that turns so many times in the original context."""
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
        """Multiplies cos and sin."""
        return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)

    @property
    def logit_scale(self) -> float:
        """Multiplies the attention logits: m^2, m = 0.1 mscale_all_dim ln(factor) + 1."""
        return self._temperature(self.mscale_all_dim) ** 2

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1


def plain_frequencies(dim: int, theta: float) -> np.ndarray:
    """theta^(-2i/dim), float32 [dim/2]: radians per token of each pair."""
    return (theta ** (-np.arange(0, dim, 2, dtype=np.float32) / dim)).astype(np.float32)


def rope_angles(positions: jax.Array, dim: int, theta: float, yarn: Yarn | None = None) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position times frequency, each [..., dim/2] float32, for integer positions [...]."""
    frequency, scale = plain_frequencies(dim, theta), 1.0
    if yarn is not None:
        frequency, scale = yarn.frequencies(dim, theta), yarn.rotation_scale
    angle = positions[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, halves: bool = False) -> jax.Array:
    """Rotates pairs of the last dimension P; cos and sin broadcast against [..., P/2].

    A pair is (x_2i, x_2i+1), or with `halves` (x_i, x_i+P/2): a matter of convention, but weights follow one of them.
    """
    if halves:
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1).astype(x.dtype)
    even, odd = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)
