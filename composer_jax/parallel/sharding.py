"""The one table from logical axes of weights to mesh axes, and the storage and gathering that follow from it.

Outside the model a weight is stored under `storage_spec`. The model runs as a per-device program (`jax.shard_map` over
every mesh axis): `all_gather_fsdp` gathers the shards of a weight before use, and its transpose under differentiation
is the reduce-scatter of the gradient. So every collective of a step is a line of code here, in dispatch/, or in the
loss, and a mesh of one device has none.
"""

import math

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from composer_jax.errors import UserError
from composer_jax.ops.vma import pcast_varying, varying_axes
from composer_jax.parallel.mesh import TOKEN_AXES

EXPERT_AXES = ("expert", "tensor")
"""Mesh axes that experts are divided over, the first varying slowest. Tokens are sharded over `expert` and replicated
over `tensor` (parallel/dispatch/contract.py)."""

LOGICAL_AXIS_RULES = {
    "embed": ("data", "context"),  # the model width of dense and expert weights: FSDP
    "rank": ("data", "context"),  # the width of a latent, in weights without a model width
    "experts": EXPERT_AXES,  # each device owns whole experts
    "heads": ("tensor",),
    "ff": ("tensor",),  # the hidden width of dense and shared feed-forward blocks
    "vocab": ("tensor",),
}
"""Logical axis -> mesh axes that shard it in storage, the first varying slowest. Other logical axes are replicated."""

FSDP_AXES = ("data", "context")
"""Mesh axes that shard weights in storage only: the shards are all-gathered before use. Shards along other axes are
used where they are."""


def storage_spec(mesh: Mesh, axes: tuple[str | None, ...]) -> PartitionSpec:
    """Returns the PartitionSpec of a stored weight with these logical axes; mesh axes of size 1 are left out.

    Raises:
      UserError: two logical axes map to one mesh axis.
    """
    rules = [_rule(axis) for axis in axes]
    mesh_axes = [axis for rule in rules for axis in rule]
    if len(mesh_axes) != len(set(mesh_axes)):
        raise UserError(f"The logical axes {axes} map twice to one mesh axis: {rules}; change LOGICAL_AXIS_RULES.")
    sharded = [tuple(axis for axis in rule if mesh.shape[axis] > 1) for rule in rules]
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in sharded))


def storage_sharding(mesh: Mesh, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> NamedSharding:
    """Returns the NamedSharding of a stored weight.

    Raises:
      UserError: a dimension does not divide over its mesh axes; the message names the numbers.
    """
    for size, logical in zip(shape, axes, strict=True):
        rule = _rule(logical)
        if size % math.prod(mesh.shape[axis] for axis in rule):
            over = " and ".join(f"{axis}={mesh.shape[axis]}" for axis in rule if mesh.shape[axis] > 1)
            raise UserError(f"{size} {logical} do not divide over mesh axis {over}; use a divisor of {size}.")
    return NamedSharding(mesh, storage_spec(mesh, axes))


def axis_size(axis: str) -> int:
    """Returns the size of a mesh axis inside the per-device program; 1 outside any mesh."""
    return jax.sharding.get_abstract_mesh().shape.get(axis, 1)


def all_gather_fsdp(weight: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """All-gathers the dimensions of a weight that are sharded over FSDP_AXES; identity on one device.

    The shard is typed as varying over the token axes before the gather, so that its gradient is first reduce-scattered
    and only the resulting shard is summed over the other axes. Left to the gather's use, the whole gradient would be
    summed.

    Args:
      weight: this device's shard, any dtype.
      axes: the logical axis of each dimension.
    """
    chex.assert_rank(weight, len(axes))
    for dim, logical in enumerate(axes):
        sharded = tuple(axis for axis in _rule(logical) if axis in FSDP_AXES and axis_size(axis) > 1)
        if sharded:
            weight = jax.lax.all_gather(_vary_over_tokens(weight), sharded, axis=dim, tiled=True)
    return weight


def psum_tensor(partial: jax.Array) -> jax.Array:
    """Sums the contributions of each device's heads, hidden columns or vocabulary shard over `tensor`."""
    chex.assert_type(partial, jnp.floating)
    return jax.lax.psum(partial, "tensor") if axis_size("tensor") > 1 else partial


def _rule(logical: str | None) -> tuple[str, ...]:
    """Returns the mesh axes that shard a logical axis."""
    return LOGICAL_AXIS_RULES.get(logical, ()) if logical else ()


def _vary_over_tokens(weight: jax.Array) -> jax.Array:
    """Types the weight as varying over every token axis; unchanged in programs without VMA checks."""
    varying = varying_axes(weight)
    return pcast_varying(weight, varying | {axis for axis in TOKEN_AXES if axis_size(axis) > 1}) if varying else weight
