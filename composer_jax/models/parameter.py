"""Declaration of weights with their logical axes, and the gather of a weight before use."""

import math
from typing import TYPE_CHECKING

import jax
from flax import nnx
from jax.typing import DTypeLike

from composer_jax.parallel.sharding import all_gather_fsdp

if TYPE_CHECKING:
    from composer_jax.models.config import ModelConfig


class RouterBias(nnx.Variable):
    """Selection bias of the router. The load rule moves it after a step; it has no gradient, so it is no nnx.Param."""


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
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], *, fan_in: int, config: "ModelConfig"
) -> nnx.Param:
    """Returns a normally distributed weight with standard deviation config.init_std, or 1/sqrt(fan_in) if None."""
    std = 1 / math.sqrt(fan_in) if config.init_std is None else config.init_std
    return parameter(std * jax.random.normal(rngs.params(), shape, config.param_dtype), *axes, decays=True)


def gather_param(param: nnx.Variable, dtype: DTypeLike) -> jax.Array:
    """Returns the weight cast to `dtype` and then all-gathered over the FSDP mesh axes."""
    return all_gather_fsdp(param.get_value().astype(dtype), param.get_metadata()["axes"])
