"""What every dispatch takes and returns, and which devices it works among.

    dispatch(x_TD, ids_Tk, gates_Tk, experts, activation, *, capacity_factor, split) -> Dispatched

`experts` holds the experts of this device, E' of them; ids_Tk count over the experts of all devices of the group, and
the choices of one token differ. Expert e is on device e // E' of the group, which is numbered along the mesh axes
`split.experts`, the first of them slowest. Expert -1 is nobody: a pair that asks for it adds nothing, goes nowhere and
does not count as dropped. `capacity_factor` sizes the buffers of
all but `dense`.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.ops.vma import pcast_varying, varying_axes
from composer_jax.parallel.sharding import EXPERT_AXES, axis_size


class Biases(NamedTuple):
    gate_EF: jax.Array
    up_EF: jax.Array
    down_ED: jax.Array


class Experts(NamedTuple):
    """expert(x) = activation(x gate + b_gate, x up + b_up) down + b_down; no biases are biases of zero."""

    gate_EDF: jax.Array
    up_EDF: jax.Array
    down_EFD: jax.Array
    biases: Biases | None = None


class Dispatched(NamedTuple):
    """y_TD, and float32 []: how many (token, choice) pairs of this device's T tokens were dropped.

    Both are the same along mesh axes along which the tokens are.
    """

    y_TD: jax.Array
    dropped: jax.Array


class Split(NamedTuple):
    """The mesh axes over which tokens and experts are divided. Along axes of `experts` that are not in `tokens`, all
    devices have the same tokens; those of `tokens` come first in `experts`."""

    tokens: tuple[str, ...] = ("expert",)
    experts: tuple[str, ...] = EXPERT_AXES

    @property
    def group(self) -> tuple[str, ...]:
        """Axes of more than one device over which experts are divided; none: all experts are here."""
        return tuple(axis for axis in self.experts if axis_size(axis) > 1)

    @property
    def apart(self) -> tuple[str, ...]:
        """Those of the group over which tokens are divided as well."""
        return tuple(axis for axis in self.group if axis in self.tokens)

    @property
    def alike(self) -> tuple[str, ...]:
        """Those of the group along which tokens are the same."""
        return tuple(axis for axis in self.group if axis not in self.tokens)


SPLIT = Split()
"""How the package stores experts (parallel/sharding.py)."""


def devices_along(axes: tuple[str, ...]) -> int:
    return math.prod(map(axis_size, axes))


def dispatched(y_TD: jax.Array, like_TD: jax.Array, dropped: jax.Array | None = None) -> Dispatched:
    """Both results, varying along the mesh axes that the tokens vary along.

    Experts that are stored along an axis of a single device make y formally different along it, though there is
    nobody to differ from: a sum over that axis says so to shard_map.
    """
    nobody = lambda a: tuple(sorted(axis for axis in varying_axes(a) - varying_axes(like_TD) if axis_size(axis) == 1))  # noqa: E731
    settled = lambda a: jax.lax.psum(a, nobody(a)) if nobody(a) else a  # noqa: E731
    dropped = jnp.zeros((), jnp.float32) if dropped is None else dropped
    return Dispatched(settled(y_TD), pcast_varying(settled(dropped), varying_axes(like_TD)))
