"""The contract of expert dispatch: operands, result, and the mesh axes that devices exchange tokens over.

    dispatch(x_TD, ids_Tk, gates_Tk, experts, activation, *, capacity_factor, axes) -> y_TD, dropped

`dropped` is float32 [], the number of dropped pairs, or None if the function drops nothing.

`experts` holds the E' experts of this device. `ids_Tk` count over the experts of all devices of the group, and the
choices of one token differ. Expert e is on device e // E' of the group, whose devices are numbered along the mesh axes
`axes.experts`, the first of them slowest. A pair with expert id -1 has no expert: it adds nothing, is sent nowhere and
does not count as dropped. `capacity_factor` sizes the buffers of all implementations but `dense`.

An implementation is a `Dispatch`: the function, and whether it may drop pairs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.ops.activation import Activation, swiglu
from composer_jax.ops.quantized_matmul import Precision
from composer_jax.ops.shapes import check_shapes
from composer_jax.ops.vma import pcast_varying, varying_axes
from composer_jax.parallel.sharding import EXPERT_AXES, axis_size


class Biases(NamedTuple):
    gate_EF: jax.Array
    up_EF: jax.Array
    down_ED: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("gate_EDF", "up_EDF", "down_EFD", "biases"),
    meta_fields=("precision",),
)
@dataclasses.dataclass(frozen=True)
class Experts:
    """expert(x) = activation(x gate + b_gate, x up + b_up) down + b_down; without biases they are zero."""

    gate_EDF: jax.Array
    up_EDF: jax.Array
    down_EFD: jax.Array
    biases: Biases | None = None
    precision: Precision = "none"
    """Format that the operands of the three products are rounded to (ops/quantized_matmul.py)."""


class DispatchOutput(NamedTuple):
    """The result of a dispatch. Both arrays are replicated over the mesh axes over which the tokens are."""

    y_TD: jax.Array
    """Weighted sums of the chosen experts, in the dtype of the tokens."""
    dropped: jax.Array
    """float32 []: dropped (token, choice) pairs among the T tokens of this device."""


class DispatchAxes(NamedTuple):
    """The mesh axes over which tokens and experts are divided.

    Tokens are replicated over the axes of `experts` that are not in `tokens`. Axes in both come first in `experts`.
    """

    tokens: tuple[str, ...] = ("expert",)
    experts: tuple[str, ...] = EXPERT_AXES

    @property
    def group(self) -> tuple[str, ...]:
        """Axes of more than one device over which experts are divided; empty if every device has all experts."""
        return tuple(axis for axis in self.experts if axis_size(axis) > 1)

    @property
    def sharded_axes(self) -> tuple[str, ...]:
        """Axes of the group over which tokens are sharded as well."""
        return tuple(axis for axis in self.group if axis in self.tokens)

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """Axes of the group over which tokens are replicated."""
        return tuple(axis for axis in self.group if axis not in self.tokens)


DISPATCH_AXES = DispatchAxes()
"""The axes of the package's own layout of experts (parallel/sharding.py)."""


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """An implementation of expert dispatch. A call checks the operands, and types the output like the tokens."""

    function: Callable[..., tuple[jax.Array, jax.Array | None]]
    """The function of the module's docstring; it returns y_TD and the number of dropped pairs, None for none."""
    may_drop: bool
    """Whether it may drop pairs beyond a capacity. Training counts them. The sampler does not, so RL and evaluation
    refuse such a dispatch, and serving computes with the ring instead."""

    def __call__(
        self,
        x_TD: jax.Array,
        ids_Tk: jax.Array,
        gates_Tk: jax.Array,
        experts: Experts,
        activation: Activation = swiglu,
        *,
        capacity_factor: float = 2.0,
        axes: DispatchAxes = DISPATCH_AXES,
    ) -> DispatchOutput:
        _check_operands(x_TD, ids_Tk, gates_Tk, experts)
        options = dict(capacity_factor=capacity_factor, axes=axes)
        y_TD, dropped = self.function(x_TD, ids_Tk, gates_Tk, experts, activation, **options)
        return _dispatch_output(y_TD, x_TD, dropped)


def _check_operands(x_TD: jax.Array, ids_Tk: jax.Array, gates_Tk: jax.Array, experts: Experts) -> None:
    """Raises an AssertionError that names the array if the shapes or dtypes of a dispatch's operands do not fit."""
    gate_EF, up_EF, down_ED = experts.biases or (None, None, None)
    check_shapes(
        x_TD=(x_TD, jnp.floating),
        ids_Tk=(ids_Tk, jnp.integer),
        gates_Tk=(gates_Tk, jnp.floating),
        gate_EDF=(experts.gate_EDF, jnp.floating),
        up_EDF=(experts.up_EDF, jnp.floating),
        down_EFD=(experts.down_EFD, jnp.floating),
        gate_EF=(gate_EF, jnp.floating),
        up_EF=(up_EF, jnp.floating),
        down_ED=(down_ED, jnp.floating),
    )


def _dispatch_output(y_TD: jax.Array, x_TD: jax.Array, dropped: jax.Array | None) -> DispatchOutput:
    """Returns the output, typed as varying over the same mesh axes as the tokens x_TD.

    Experts stored along an axis of size 1 make y typed as varying over it (shard_map's VMA), which a psum over that
    axis removes.
    """

    def drop_size_1_axes(a: jax.Array) -> jax.Array:
        extra = tuple(sorted(axis for axis in varying_axes(a) - varying_axes(x_TD) if axis_size(axis) == 1))
        return jax.lax.psum(a, extra) if extra else a

    dropped = jnp.zeros((), jnp.float32) if dropped is None else dropped
    y_TD = drop_size_1_axes(y_TD)
    return DispatchOutput(y_TD, pcast_varying(drop_size_1_axes(dropped), varying_axes(x_TD)))


def group_size(axes: tuple[str, ...]) -> int:
    """Returns the number of devices along several mesh axes."""
    return math.prod(map(axis_size, axes))
