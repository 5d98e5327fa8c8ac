"""The one table from logical axes of weights to mesh axes, and the two things that follow from it.

Outside the model a weight is *stored* according to `storage_spec`. The model itself runs as a per-device program
(`jax.shard_map` over every mesh axis): `all_gather_fsdp` fetches the parts of a weight that are stored elsewhere, and
its transpose under differentiation is the reduce-scatter of the gradient. So every collective of a step is a line of
code here, in dispatch/, or in the loss, and a mesh of one device has none.
"""

import math

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from composer_jax.errors import UserError
from composer_jax.ops.vma import pcast_varying, varying_axes
from composer_jax.parallel.mesh import TOKEN_AXES

EXPERT_AXES = ("expert", "tensor")
"""Mesh axes that experts are divided over, the first slowest. Tokens are divided over `expert` and the same along
`tensor` (parallel/dispatch/contract.py)."""

LOGICAL_AXIS_RULES = {
    "embed": ("data", "context"),  # the model width of dense and expert weights: FSDP
    "rank": ("data", "context"),  # the width of a latent, of weights that have no model width
    "experts": EXPERT_AXES,  # each device owns whole experts
    "heads": ("tensor",),
    "ff": ("tensor",),  # the hidden width of dense and shared feed-forward blocks
    "vocab": ("tensor",),
}
"""Logical axis -> mesh axes that store it, the first varying slowest. Axes that are not listed are replicated."""

FSDP_AXES = ("data", "context")
"""Mesh axes that only store: their parts are gathered before use. Everything else is used where it is."""


def storage_spec(mesh: Mesh, axes: tuple[str | None, ...]) -> PartitionSpec:
    """The PartitionSpec under which a weight with these logical axes is stored; mesh axes of size 1 are left out."""
    spec = [LOGICAL_AXIS_RULES.get(axis, ()) if axis else () for axis in axes]
    used = [axis for stored in spec for axis in stored]
    if len(used) != len(set(used)):
        raise UserError(f"The logical axes {axes} map twice to one mesh axis: {spec}; change LOGICAL_AXIS_RULES.")
    split = [tuple(axis for axis in stored if mesh.shape[axis] > 1) for stored in spec]
    return PartitionSpec(*(stored[0] if len(stored) == 1 else stored or None for stored in split))


def storage_sharding(mesh: Mesh, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> NamedSharding:
    """NamedSharding of a stored weight; checks that the mesh divides it and names the numbers if not."""
    for size, logical in zip(shape, axes, strict=True):
        stored = LOGICAL_AXIS_RULES.get(logical, ()) if logical else ()
        if size % math.prod(mesh.shape[axis] for axis in stored):
            over = " and ".join(f"{axis}={mesh.shape[axis]}" for axis in stored if mesh.shape[axis] > 1)
            raise UserError(f"{size} {logical} do not divide over mesh axis {over}; use a divisor of {size}.")
    return NamedSharding(mesh, storage_spec(mesh, axes))


def axis_size(axis: str) -> int:
    """Size of a mesh axis inside the per-device program; 1 outside any mesh."""
    return jax.sharding.get_abstract_mesh().shape.get(axis, 1)


def all_gather_fsdp(weight: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """All-gathers the dimensions of a weight that are stored on FSDP_AXES axes; identity on one device.

    The part is marked as different between the devices that have different tokens before it is gathered, not by its
    use: so its gradient is first scattered and then, a part only, added up over the other axes.
    """
    for dim, logical in enumerate(axes):
        stored = LOGICAL_AXIS_RULES.get(logical, ()) if logical else ()
        apart = tuple(axis for axis in stored if axis in FSDP_AXES and axis_size(axis) > 1)
        if apart:
            weight = jax.lax.all_gather(_differing(weight), apart, axis=dim, tiled=True)
    return weight


def _differing(weight: jax.Array) -> jax.Array:
    """Marked as varying along every axis that tokens are divided over; as it is where JAX keeps no such book."""
    marked = varying_axes(weight)
    return pcast_varying(weight, marked | {axis for axis in TOKEN_AXES if axis_size(axis) > 1}) if marked else weight


def psum_tensor(partial: jax.Array) -> jax.Array:
    """The sum over `tensor` of what each device's heads, hidden columns or words contribute."""
    return jax.lax.psum(partial, "tensor") if axis_size("tensor") > 1 else partial
