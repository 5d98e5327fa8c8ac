"""Products of activations with weights, in the precision of the config (ops/quantized_matmul.py)."""

import math
from typing import Literal

import chex
import jax
import jax.numpy as jnp

from composer_jax.errors import UserError
from composer_jax.ops.fake_quantization import MX_BLOCK, fake_mxfp8, fake_nvfp4
from composer_jax.ops.matmul import matmul
from composer_jax.ops.quantized_matmul import Precision, quantized_matmul
from composer_jax.parallel.sharding import axis_size


def project(
    x: jax.Array,
    weight: jax.Array,
    precision: Precision,
    *,
    contracted: int = 1,
    sharded: Literal["in", "out"] | None = None,
) -> jax.Array:
    """Returns the sum over the last `contracted` dimensions of x and the first ones of a weight, in the dtype of x.

    Args:
      x: [..., *in]. weight: [*in, *out] on this device. The result is [..., *out].
      sharded: which of the weight's dimensions are sharded over `tensor`. With "in", the result is this device's
        summand; None: neither.

    Raises:
      UserError: with a precision, the numbers of a device along the sharded dimensions do not fill blocks of 32, so
        that a block would lie on two devices.
    """
    chex.assert_type([x, weight], jnp.floating)
    if precision == "none":
        return matmul(x, weight, contracted)
    outputs = weight.shape[contracted:]
    width_in, width_out = math.prod(weight.shape[:contracted]), math.prod(outputs)
    devices = axis_size("tensor")
    if sharded and devices > 1:
        width = width_in if sharded == "in" else width_out
        if width % MX_BLOCK:
            raise UserError(
                f"precision={precision!r} has blocks of {MX_BLOCK}, which do not divide the {width} numbers that a "
                f"device has of a row with mesh.tensor={devices}; use a smaller mesh.tensor or precision='none'."
            )
    mesh_axis = "tensor" if sharded == "in" and devices > 1 else None
    y_TF = quantized_matmul(x.reshape(-1, width_in), weight.reshape(width_in, width_out), precision, mesh_axis)
    return y_TF.reshape(*x.shape[: x.ndim - contracted], *outputs)


def fake_quantize(x: jax.Array, axis: int, precision: Precision) -> jax.Array:
    """Returns x as the forward pass of `project` rounds an operand along the contracted axis, in the dtype of x."""
    if precision == "none":
        return x
    return fake_mxfp8(x, axis) if precision == "mxfp8" else fake_nvfp4(x, axis)
