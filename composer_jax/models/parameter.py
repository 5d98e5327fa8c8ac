"""Declaration of weights with their logical axes, and the gather of a weight before use."""

import dataclasses
import math

import jax
from flax import nnx
from jax.typing import DTypeLike

from composer_jax.models.config import ModelConfig
from composer_jax.ops.quantization import QuantizedArray
from composer_jax.parallel.sharding import all_gather_fsdp


@dataclasses.dataclass(frozen=True)
class MatrixAxes:
    """Which two dimensions of a weight make a matrix, counted from the end. The others stack matrices: layers, experts,
    and heads."""

    in_axis: int
    out_axis: int


class RouterBias(nnx.Variable):
    """Selection bias of the router. The load rule moves it after a step. It has no gradient: not an nnx.Param."""


def parameter(value: jax.Array, *axes: str | None, decays: bool = False) -> nnx.Param:
    """Returns a trained variable whose dimensions carry logical axis names (parallel/sharding.py maps them to a mesh).

    Args:
      decays: whether weight decay applies to it, as to matrices; not to scales, biases and attention sinks.

    Raises:
      ValueError: the number of names is not the number of dimensions.
    """
    if len(axes) != value.ndim:
        raise ValueError(f"{len(axes)} axis names {axes} for an array of shape {value.shape}")
    return nnx.Param(value, axes=axes, decays=decays)


def matrix(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    config: ModelConfig,
    in_axis: int | tuple[int, ...] = 0,
    full_precision: bool = False,
) -> nnx.Param:
    """Returns a normally distributed weight with standard deviation config.init_std, or 1/sqrt(fan-in) if None.

    Args:
      in_axis: the dimensions that a product with the weight sums over, as in jax.nn.initializers; the fan-in is their
        size. An 8-bit copy of the weight has a scale for every index of the others.
      full_precision: whether a sampler with 8-bit weights keeps this one in param_dtype.
    """
    in_axes = (in_axis,) if isinstance(in_axis, int) else in_axis
    fan_in = math.prod(shape[axis] for axis in in_axes)
    std = 1 / math.sqrt(fan_in) if config.init_std is None else config.init_std
    param = parameter(std * jax.random.normal(rngs.params(), shape, config.param_dtype), *axes, decays=True)
    # Counted from the end, so that they hold for a stack of layers, too.
    param.set_metadata(in_axes=tuple(axis - len(shape) for axis in in_axes), full_precision=full_precision)
    return param


def matrix_axes(param: nnx.Variable) -> MatrixAxes | None:
    """Returns the dimensions of the matrix that a layer, an expert or a head multiplies by; None for other weights.

    The embedding table and the output head, which have a row per token of the vocabulary, count as other weights.
    """
    metadata = param.get_metadata()
    axes, in_axes = metadata["axes"], metadata.get("in_axes")
    if in_axes is None or "vocab" in axes:
        return None
    # Heads are summed over by the output projection, but each has a matrix of its own.
    in_axis = max(in_axes)
    return MatrixAxes(in_axis, max(axis for axis in range(-len(axes), 0) if axis not in in_axes))


def gather_param(param: nnx.Variable, dtype: DTypeLike) -> jax.Array:
    """Returns the weight in `dtype`, all-gathered over the FSDP mesh axes.

    A weight is cast before the gather, and its gradient is summed over devices in ModelDef.reduce_dtype. An 8-bit one
    is gathered as it is stored, and dequantised after; it has no gradient.
    """
    weight, metadata = param.get_value(), param.get_metadata()
    axes = metadata["axes"]
    if isinstance(weight, QuantizedArray):
        scales = all_gather_fsdp(weight.scales, scale_axes(axes, metadata["in_axes"]))
        return QuantizedArray(all_gather_fsdp(weight.values, axes), scales).dequantize(dtype)
    return all_gather_fsdp(weight, axes, dtype, metadata.get("reduce_dtype", "float32"))


def scale_axes(axes: tuple[str | None, ...], in_axes: tuple[int, ...]) -> tuple[str | None, ...]:
    """Returns the logical axes of an 8-bit weight's scales: those of the weight, but None where the scales have size 1.

    in_axes: as in the variable's metadata, counted from the end.
    """
    return tuple(None if i - len(axes) in in_axes else axis for i, axis in enumerate(axes))
