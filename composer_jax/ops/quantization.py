"""8-bit weights: int8 or float8 numbers, and one float32 scale per output column of a matrix.

A column's largest magnitude becomes the largest number of the dtype: 127 of int8, 448 of float8_e4m3fn (OCP 8-bit
Floating Point Specification, revision 1.0). The activations are not quantised (W8A16).
"""

import dataclasses
import functools
from typing import Generic, TypeVar

import chex
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Leaf = TypeVar("Leaf")

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""8-bit dtypes, and the largest number of each."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=("values", "scales"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class QuantizedArray(Generic[Leaf]):
    """A weight as 8-bit numbers times scales; a pytree of arrays, or of their shapes, specs or shardings."""

    values: Leaf
    """int8 or float8_e4m3fn, in the weight's shape."""
    scales: Leaf
    """float32, in the weight's shape with 1 in the dimensions that a product sums over."""

    def dequantize(self: "QuantizedArray[jax.Array]", dtype: DTypeLike) -> jax.Array:
        """Returns values * scales, computed in float32, in `dtype`."""
        return (self.values.astype(jnp.float32) * self.scales).astype(dtype)


def quantize_weight(weight: jax.Array, in_axes: tuple[int, ...], dtype: str) -> QuantizedArray[jax.Array]:
    """Returns a floating weight in 8 bits, rounded to the nearest; a column of zeros keeps them, with scale 0.

    Args:
      in_axes: the dimensions that a product with the weight sums over. Indices of the others have a scale of their own.
      dtype: one of LARGEST.
    """
    chex.assert_type(weight, jnp.floating)
    wide, largest = weight.astype(jnp.float32), LARGEST[dtype]
    scales = jnp.abs(wide).max(in_axes, keepdims=True) / largest
    scaled = jnp.clip(jnp.where(scales > 0, wide / scales, 0), -largest, largest)
    return QuantizedArray((jnp.round(scaled) if dtype == "int8" else scaled).astype(dtype), scales)
