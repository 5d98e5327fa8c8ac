"""Fake quantisation: numbers rounded to those that a format of few bits can hold, in a floating-point array.

    MXFP8    blocks of 32; s = 2^ceil(log2(amax/448)); x -> s e4m3(x/s)
    NVFP4'   g = amax of the token/(6 448) in float32; blocks of 16 with s = e4m3(amax/(6 g)); x -> s g e2m1(x/(s g))
    INT4     groups of 32; s = amax/7; x -> s round(x/s)

MXFP8 is that of the OCP Microscaling Formats specification (version 1.0) with the scale rounded up, so that no number
saturates (NVIDIA, arXiv 2506.08027). NVFP4' is NVFP4 (NVIDIA, arXiv 2509.25149) with a scale g of each token instead of
each tensor (Composer 2, arXiv 2603.24477): a tensor's scale would make a token's result depend on the rest of the batch
and on tokens after it. A weight has a g of each output. INT4 is that of Kimi K2's published experts (K2 Thinking).

Roundings are to the nearest, ties to even, and saturate; divisions are those of IEEE 754. The last block of an axis may
be shorter. A block with an infinity or NaN becomes NaN. Scales below float32's smallest normal number, 2^-126, may lose
their numbers to zero.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

MX_BLOCK, NV_BLOCK, INT4_GROUP = 32, 16, 32
"""Numbers that share a scale."""
E4M3_LARGEST, E2M1_LARGEST, INT4_LARGEST = 448.0, 6.0, 7.0
"""Largest number of each format; INT4's -8 is not used."""


class Scaled(NamedTuple):
    """An array x = values * scale."""

    values: jax.Array
    """float32 numbers that bfloat16 holds exactly."""
    scale: jax.Array
    """float32, with size 1 along the quantised axis: g of NVFP4'."""


def fake_mxfp8(x: jax.Array, axis: int) -> jax.Array:
    """Returns x rounded to MXFP8 in blocks along an axis, in the dtype of x; exact in bfloat16 and float32."""
    chex.assert_type(x, jnp.floating)
    amax = _expand(_block_amax(x, axis, MX_BLOCK), x, axis, MX_BLOCK)
    return round_mxfp8(x, amax).astype(x.dtype)


def fake_nvfp4(x: jax.Array, axis: int, mesh_axis: str | None = None) -> jax.Array:
    """Returns x rounded to NVFP4' along an axis, in the dtype of x; arguments are those of `scaled_nvfp4`."""
    values, scale = scaled_nvfp4(x, axis, mesh_axis)
    return (values * scale).astype(x.dtype)


def fake_int4(x: jax.Array, axis: int) -> jax.Array:
    """Returns x rounded to INT4 in groups along an axis, in the dtype of x. The gradient passes straight through."""
    chex.assert_type(x, jnp.floating)
    wide = x.astype(jnp.float32)
    scale = _expand(divide(_block_amax(wide, axis, INT4_GROUP), INT4_LARGEST), x, axis, INT4_GROUP)
    rounded = jnp.clip(jnp.round(divide(wide, scale)), -INT4_LARGEST, INT4_LARGEST) * scale
    # x - x is zero, so the sum is the rounded value to the last bit.
    return jax.lax.stop_gradient(rounded.astype(x.dtype)) + (x - jax.lax.stop_gradient(x))


def scaled_nvfp4(x: jax.Array, axis: int, mesh_axis: str | None = None) -> Scaled:
    """Returns x rounded to NVFP4' along an axis, with g apart: a product of the values can be scaled afterwards.

    Args:
      mesh_axis: mesh axis over which `axis` is sharded, whose devices then have one g together; None: not sharded.
    """
    chex.assert_type(x, jnp.floating)
    x = x.astype(jnp.float32)
    amax = jnp.abs(x).max(axis, keepdims=True)
    if mesh_axis is not None:
        amax = jax.lax.pmax(amax, mesh_axis)
    g = divide(amax, E2M1_LARGEST * E4M3_LARGEST)
    scale = _expand(round_e4m3(divide(_block_amax(x, axis, NV_BLOCK), E2M1_LARGEST * g)), x, axis, NV_BLOCK)
    return Scaled(round_e2m1(divide(x, scale * g)) * scale, g)


def round_mxfp8(x: jax.Array, amax: jax.Array) -> jax.Array:
    """Returns x rounded to MXFP8, float32. amax: largest magnitude of each number's block, in the shape of x."""
    amax = amax.astype(jnp.float32)
    # 448 is 1.75 * 2^8, so this is ceil(log2(amax/448)) without a rounding.
    exponent = jnp.maximum(_exponent(amax) - 8 + (_bits(amax) & 0x7FFFFF > 0x600000), -126)
    exponent = jnp.minimum(exponent, 120)  # of infinity and NaN, which the last line replaces
    rounded = round_e4m3(x.astype(jnp.float32) * _power_of_two(-exponent)) * _power_of_two(exponent)
    return jnp.where(jnp.isfinite(amax), rounded, jnp.nan)


def round_e4m3(x: jax.Array) -> jax.Array:
    """Returns float32 numbers rounded to float8_e4m3fn: 0, 2^-9, .., 448."""
    return _round_float(x, 3, -6, E4M3_LARGEST)


def round_e2m1(x: jax.Array) -> jax.Array:
    """Returns float32 numbers rounded to float4_e2m1fn: 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    return _round_float(x, 1, 0, E2M1_LARGEST)


def _round_float(x: jax.Array, mantissa_bits: int, least_exponent: int, largest: float) -> jax.Array:
    """Rounds to a format with so many bits after the leading one, subnormal below 2^least_exponent.

    A cast to the format would round twice on some backends, and does not saturate.
    """
    power = jnp.clip(_exponent(x), least_exponent, 127) - mantissa_bits
    return jnp.clip(jnp.round(x * _power_of_two(-power)) * _power_of_two(power), -largest, largest)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _exponent(x: jax.Array) -> jax.Array:
    """Returns floor(log2 |x|) of float32 numbers; -127 below 2^-126."""
    return (_bits(x) >> 23 & 255) - 127


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Returns 2^exponent in float32, for exponents from -126 to 127."""
    return jax.lax.bitcast_convert_type(exponent + 127 << 23, jnp.float32)


def divide(x: jax.Array, divisor: jax.Array | float) -> jax.Array:
    """Returns the IEEE quotient of float32 numbers, 0 where the divisor is 0. The divisor broadcasts to x.

    XLA multiplies by the rounded reciprocal where the divisor is a constant or a broadcast, which differs from the
    quotient in a fifth of all numbers. It sees neither here, because the divisor depends on x, number by number. So x
    itself may not be a broadcast.
    """
    return jnp.where(divisor == 0, 0, x / jnp.where(jnp.isnan(x), jnp.nan, jnp.where(divisor == 0, 1, divisor)))


def _block_amax(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Returns the largest magnitude of each block of `size` along the axis, which is as long as there are blocks."""
    axis %= x.ndim
    padded = jnp.pad(jnp.abs(x), [(0, -x.shape[axis] % size if i == axis else 0) for i in range(x.ndim)])
    return padded.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]).max(axis + 1)


def _expand(blocks: jax.Array, x: jax.Array, axis: int, size: int) -> jax.Array:
    """Returns the value of each number's block, in the shape of x."""
    axis %= x.ndim
    return jax.lax.slice_in_dim(jnp.repeat(blocks, size, axis), 0, x.shape[axis], axis=axis)
