"""The device mesh: five named axes, any of which may have size 1."""

import math

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, PartitionSpec

from composer_jax.errors import UserError

AXES = ("replica", "data", "expert", "context", "tensor")
BATCH_AXES = ("replica", "data", "expert")
"""Rows of a batch are spread over these; experts use the `expert` part of them for weights as well."""
BATCH_SPEC = PartitionSpec(BATCH_AXES, "context")
"""How a batch [B,S] lies on the mesh; the positions in an order of their own (parallel/context.py)."""
TOKEN_AXES = (*BATCH_AXES, "context")
"""Along these, devices have different tokens."""


def make_mesh(devices: list[jax.Device] | None = None, **sizes: int) -> Mesh:
    """Builds the mesh; axes not named have size 1, and one of -1 takes the devices that the others leave.

    Raises:
      UserError: an unknown axis, or sizes whose product is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    unknown = sorted(set(sizes) - set(AXES))
    if unknown:
        raise UserError(f"Unknown mesh axis {unknown[0]!r}; the axes are {', '.join(AXES)}.")
    left = [axis for axis, size in sizes.items() if size == -1]
    if len(left) > 1:
        raise UserError(f"Only one mesh axis can be -1, not {' and '.join(left)}.")
    if min([size for size in sizes.values() if size != -1], default=1) < 1:
        raise UserError(f"Mesh sizes must be at least 1, got {sizes}.")
    if left:
        others = {axis: size for axis, size in sizes.items() if axis != left[0] and size != 1}
        share, rest = divmod(len(devices), math.prod(others.values()))
        if rest:
            axes = " x ".join(f"{axis}={size}" for axis, size in others.items())
            raise UserError(f"{len(devices)} devices do not divide over {axes}, which leaves none for {left[0]}=-1.")
        sizes[left[0]] = share
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    if math.prod(shape) != len(devices):
        raise UserError(
            f"The mesh {dict(zip(AXES, shape, strict=True))} needs {math.prod(shape)} devices, "
            f"but {len(devices)} are there; change the mesh sizes or the number of devices."
        )
    types = (AxisType.Auto,) * len(AXES)
    try:
        return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)
    except NotImplementedError:
        # A dimension of a TPU's torus has to be divided between axes, which JAX does only when told to.
        arranged = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(arranged, AXES, axis_types=types)


def batch_shards(mesh: Mesh) -> int:
    """Into how many parts the rows of a batch are divided."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
