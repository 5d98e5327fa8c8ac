"""The one table from logical axes of weights to mesh axes, and the storage and gathering that follow from it.

Outside the model a weight is stored under `storage_spec`. The model runs as a per-device program (`jax.shard_map` over
every mesh axis): `all_gather_fsdp` gathers the shards of a weight before use, and its gradient is the reduce-scatter.
So every collective of a step is a line of code here, in dispatch/, or in the loss, and a mesh of one device has none.
"""

import functools
import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

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


def all_gather_fsdp(
    weight: jax.Array, axes: tuple[str | None, ...], dtype: DTypeLike | None = None, reduce_dtype: str = "float32"
) -> jax.Array:
    """Casts a weight and all-gathers the dimensions that are sharded over FSDP_AXES; only a cast on one device.

    The gather moves `dtype`. The gradient is summed over the token axes in `reduce_dtype`, whatever `dtype` is: first
    it is reduce-scattered over the gathered axes, then the resulting shard is summed over the others. Left to the
    weight's use, the whole gradient would be summed, in `dtype`.

    Args:
      weight: this device's shard, any dtype.
      axes: the logical axis of each dimension.
      dtype: of the result; None: that of the weight.
      reduce_dtype: as in MeshConfig.
    """
    chex.assert_rank(weight, len(axes))
    dtype = weight.dtype if dtype is None else jnp.dtype(dtype)
    gathered = {
        dim: sharded
        for dim, logical in enumerate(axes)
        if (sharded := tuple(axis for axis in _rule(logical) if axis in FSDP_AXES and axis_size(axis) > 1))
    }
    over_tokens = frozenset(axis for axis in TOKEN_AXES if axis_size(axis) > 1)
    if not over_tokens:
        return weight if weight.dtype == dtype else weight.astype(dtype)
    # Empty in programs without VMA checks, which have no gradient.
    summed = varying_axes(pcast_varying(weight, over_tokens)) - varying_axes(weight)
    return _gather(_Gather(tuple(gathered.items()), summed, dtype, weight.dtype, jnp.dtype(reduce_dtype)), weight)


class _Gather(NamedTuple):
    gathered: tuple[tuple[int, tuple[str, ...]], ...]
    """(dimension, mesh axes) of each gather."""
    summed: frozenset[str]
    """Token axes along which the shard is the same on all devices, and their gradients are not."""
    dtype: jnp.dtype
    stored_dtype: jnp.dtype
    reduce_dtype: jnp.dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(how: _Gather, weight: jax.Array) -> jax.Array:
    weight = pcast_varying(weight.astype(how.dtype), varying_axes(weight) | how.summed)
    for dim, mesh_axes in how.gathered:
        weight = jax.lax.all_gather(weight, mesh_axes, axis=dim, tiled=True)
    return weight


def _reduce_gradient(how: _Gather, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    gradient = gradient.astype(how.reduce_dtype)
    for dim, mesh_axes in how.gathered:
        gradient = jax.lax.psum_scatter(gradient, mesh_axes, scatter_dimension=dim, tiled=True)
    if how.summed:
        gradient = jax.lax.psum(gradient, tuple(sorted(how.summed)))
    if how.stored_dtype.itemsize < how.reduce_dtype.itemsize:
        # XLA for TPUs moves a conversion to bfloat16 from behind a sum to before it, and leaves this rounding behind.
        kept = jnp.finfo(how.stored_dtype)
        gradient = jax.lax.reduce_precision(gradient, kept.nexp, kept.nmant)
    return (gradient.astype(how.stored_dtype),)


_gather.defvjp(lambda how, weight: (_gather(how, weight), None), _reduce_gradient)


def psum_tensor(partial: jax.Array) -> jax.Array:
    """Sums the contributions of each device's heads, hidden columns or vocabulary shard over `tensor`."""
    chex.assert_type(partial, jnp.floating)
    return jax.lax.psum(partial, "tensor") if axis_size("tensor") > 1 else partial


def _rule(logical: str | None) -> tuple[str, ...]:
    """Returns the mesh axes that shard a logical axis."""
    return LOGICAL_AXIS_RULES.get(logical, ()) if logical else ()


def bytes_per_device(tree: Any) -> float:
    """Returns the bytes of one device's shards of a tree of arrays, in its own and in the host's memory."""
    return float(
        sum(math.prod(a.sharding.shard_shape(a.shape)) * np.dtype(a.dtype).itemsize for a in jax.tree.leaves(tree))
    )
