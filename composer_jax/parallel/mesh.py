"""The device mesh: five named axes, any of which may have size 1."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, PartitionSpec

from composer_jax.errors import UserError
from composer_jax.parallel.platform import compile_cpu_meshes_anew
from composer_jax.parallel.processes import process_count

AXES = ("replica", "data", "expert", "context", "tensor")
BATCH_AXES = ("replica", "data", "expert")
"""Mesh axes that shard the rows of a batch. `expert` shards the weights of experts as well."""
BATCH_SPEC = PartitionSpec(BATCH_AXES, "context")
"""The sharding of a batch [B,S], whose positions are in zigzag order (parallel/context.py)."""
ROW_SPEC = PartitionSpec(BATCH_AXES)
"""The sharding of arrays with an entry per row, whole on all devices that share the row's positions."""
TOKEN_AXES = (*BATCH_AXES, "context")
"""Mesh axes over which devices hold different tokens."""

Devices = Sequence[Any]
"""A sequence of jax.Device, which type checkers take for a variable."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The mesh of a run: how many devices lie along each axis. One axis may be -1 and takes the remaining devices.

    Raises:
      UserError: a size out of range, more than one -1, or an unknown reduction or dtype; the message names the field.
    """

    cpu_devices: int = 0
    """XLA devices that the CPU is split into, summed over all processes; 0 keeps JAX's number, one per process. Ignored
    on machines with an accelerator."""
    replica: int = -1
    """Data parallelism with a full copy of the weights in each replica."""
    data: int = 1
    """Data parallelism with sharded dense weights (FSDP)."""
    expert: int = 1
    """Data parallelism with whole experts on each device (expert parallelism)."""
    context: int = 1
    """Devices that share the positions of a row (context parallelism, parallel/context.py)."""
    tensor: int = 1
    """Devices that share heads, hidden columns and vocabulary of a layer (tensor parallelism)."""
    reduction: Literal["collective", "host"] = "collective"
    """How gradients are summed over `replica`: "collective" inside the compiled step; "host" by the host, in one
    process only, so that the CPU's thread pool cannot stall in a collective (train/learner.py)."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which devices sum the gradients of weights, whatever dtype the weights are gathered in (PyTorch FSDP's
    reduce_dtype, Megatron's grad_reduce_in_fp32). "bfloat16" sends 2 bytes instead of 4 for every number and rounds
    every partial sum (docs/scale.md)."""

    def __post_init__(self):
        if self.cpu_devices < 0:
            raise UserError(
                f"mesh.cpu_devices={self.cpu_devices} is negative; use a number of devices, or 0 for JAX's."
            )
        for axis, size in self.axis_sizes.items():
            if size < 1 and size != -1:
                raise UserError(f"mesh.{axis}={size} is not a number of devices; use 1 or more, or -1 for the rest.")
        remainders = [f"mesh.{axis}=-1" for axis, size in self.axis_sizes.items() if size == -1]
        if len(remainders) > 1:
            raise UserError(f"{' and '.join(remainders)}: only one axis can take the remaining devices.")
        if self.reduction not in ("collective", "host"):
            raise UserError(f"mesh.reduction={self.reduction!r} is unknown; use 'collective' or 'host'.")
        if self.reduce_dtype not in ("float32", "bfloat16"):
            raise UserError(f"mesh.reduce_dtype={self.reduce_dtype!r} is unknown; use 'float32' or 'bfloat16'.")

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Returns the size of every axis, in the order of AXES."""
        return {axis: getattr(self, axis) for axis in AXES}

    def make_mesh(self, devices: Devices | None = None) -> Mesh:
        """Builds the mesh on `devices` (None: all).

        A single process leaves devices beyond the product of the sizes unused. Several processes use all devices,
        because a process without any could not take part in collectives.

        Raises:
          UserError: the sizes do not fit the number of devices.
        """
        devices = jax.devices() if devices is None else devices
        sizes = self.axis_sizes
        if process_count() == 1 and -1 not in sizes.values():
            devices = devices[: math.prod(sizes.values())]
        return make_mesh(devices, **sizes)


def make_mesh(devices: Devices | None = None, **sizes: int) -> Mesh:
    """Builds the mesh. Axes that are not given have size 1; an axis of -1 takes the remaining devices.

    Raises:
      UserError: an unknown axis, sizes that MeshConfig refuses, or whose product is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    unknown = sorted(set(sizes) - set(AXES))
    if unknown:
        raise UserError(f"Unknown mesh axis {unknown[0]!r}; the axes are {', '.join(AXES)}.")
    fields: dict[str, Any] = {"replica": 1} | sizes  # that of a MeshConfig is -1 by default
    sizes = MeshConfig(**fields).axis_sizes
    if remainders := [axis for axis, size in sizes.items() if size == -1]:
        others = {axis: size for axis, size in sizes.items() if axis != remainders[0] and size != 1}
        quotient, unused = divmod(len(devices), math.prod(others.values()))
        if unused:
            axes = " x ".join(f"{axis}={size}" for axis, size in others.items())
            raise UserError(
                f"{len(devices)} devices do not divide over {axes}, which leaves none for {remainders[0]}=-1."
            )
        sizes[remainders[0]] = quotient
    shape = tuple(sizes.values())
    if math.prod(shape) != len(devices):
        raise UserError(
            f"The mesh {sizes} needs {math.prod(shape)} devices, but there are {len(devices)}; "
            "change the mesh sizes or the number of devices."
        )
    if devices[0].platform == "cpu" and len(devices) > 1:
        compile_cpu_meshes_anew()
    types = (AxisType.Auto,) * len(AXES)
    try:
        return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)
    except NotImplementedError:
        # One dimension of a TPU's torus has to be split between axes, which make_mesh does not do by itself.
        arranged = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(arranged, AXES, axis_types=types)


def batch_shards(mesh: Mesh) -> int:
    """Returns the number of parts into which the rows of a batch are sharded."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
