"""How a weight is declared (with the logical axes of its dimensions) and how it is fetched for use."""

import math

import jax
from flax import nnx

from composer_jax.parallel.sharding import all_gather_fsdp


class RouterBias(nnx.Variable):
    """Selection bias of the router: moved by the load rule after a step, never by a gradient, so not an nnx.Param."""


def parameter(value: jax.Array, *axes: str | None) -> nnx.Param:
    """A trainable array whose dimensions carry logical axis names (parallel/sharding.py maps them to the mesh)."""
    if len(axes) != value.ndim:
        raise ValueError(f"{len(axes)} axis names {axes} for an array of shape {value.shape}")
    return nnx.Param(value, axes=axes)


def matrix(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], *, fan_in: int, config) -> nnx.Param:
    """A normally distributed weight with standard deviation config.init_std, or 1/sqrt(fan_in) when that is None."""
    std = 1 / math.sqrt(fan_in) if config.init_std is None else config.init_std
    return parameter(std * jax.random.normal(rngs.params(), shape, config.param_dtype), *axes)


def gather_param(param: nnx.Variable, dtype) -> jax.Array:
    """The weight as the computation needs it: cast, then gathered over the mesh axes that only store it (FSDP)."""
    return all_gather_fsdp(param.get_value().astype(dtype), param.get_metadata()["axes"])
