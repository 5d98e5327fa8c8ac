"""The one table from logical axes of weights to mesh axes, and the two things that follow from it.

Outside the model a weight is *stored* according to `storage_spec`. The model itself runs as a per-device program
(`jax.shard_map` over every mesh axis): `gather_for_use` fetches the parts of a weight that are stored elsewhere, and
its transpose under differentiation is the reduce-scatter of the gradient. So every collective of a step is a line of
code here, in dispatch.py, or in the loss, and a mesh of one device has none.
"""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from composer_jax.errors import UserError

STORED_ON = {
    "embed": "data",  # the model width of dense and expert weights: FSDP
    "experts": "expert",  # each group of devices owns whole experts
}
"""Logical axis -> mesh axis that stores it. Logical axes that are not listed are replicated."""

GATHERED = ("data",)
"""Mesh axes that only store: their parts are gathered before use. Experts are used where they are."""


def storage_spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """The PartitionSpec under which a weight with these logical axes is stored."""
    spec = tuple(STORED_ON.get(axis) if axis else None for axis in axes)
    used = [axis for axis in spec if axis]
    if len(used) != len(set(used)):
        raise UserError(f"The logical axes {axes} map twice to one mesh axis: {spec}; change STORED_ON.")
    return PartitionSpec(*spec)


def storage_sharding(mesh: Mesh, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> NamedSharding:
    """NamedSharding of a stored weight; checks that the mesh divides it and names the numbers if not."""
    spec = storage_spec(axes)
    for size, logical, axis in zip(shape, axes, spec, strict=True):
        if axis and size % mesh.shape[axis]:
            raise UserError(
                f"{size} {logical} do not divide over mesh axis {axis}={mesh.shape[axis]}; use a divisor of {size}."
            )
    return NamedSharding(mesh, spec)


def axis_size(axis: str) -> int:
    """Size of a mesh axis inside the per-device program; 1 outside any mesh."""
    return jax.sharding.get_abstract_mesh().shape.get(axis, 1)


def gather_for_use(weight: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """All-gathers the dimensions of a weight that are stored on GATHERED axes; identity on one device."""
    for dim, logical in enumerate(axes):
        axis = STORED_ON.get(logical) if logical else None
        if axis in GATHERED and axis_size(axis) > 1:
            weight = jax.lax.all_gather(weight, axis, axis=dim, tiled=True)
    return weight
