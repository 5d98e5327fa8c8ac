"""The devices of a TPU slice for compiling without the hardware, and their torus."""

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from composer_jax.errors import UserError
from composer_jax.parallel.chips import CHIPS, Chip
from composer_jax.parallel.mesh import make_mesh

_NAME = re.compile(r"(\w+):(\d+(?:x\d+){1,2})$")


def disable_tpu_hardware() -> None:
    """Sets environment variables of libtpu and JAX; must be called before JAX is imported.

    With them no TPU is looked for, several processes can compile at once, and libtpu logs nothing.
    """
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "none",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": "disabled",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


@dataclasses.dataclass(frozen=True)
class Slice:
    """A TPU topology that XLA can compile for."""

    name: str
    chip: Chip
    torus: tuple[int, ...]
    """Chips in each dimension."""
    devices: tuple[Any, ...]
    """jax.Device objects of the compiler's description."""

    @property
    def chips(self) -> int:
        return math.prod(self.torus)

    def mesh(self, sizes: Mapping[str, int]) -> Mesh:
        """Returns the devices as a mesh of these sizes; -1, for one axis, takes the devices that the others leave.

        Raises:
          UserError: the product of the sizes is not the number of devices, or no layout on the torus was found.
        """
        return make_mesh(list(self.devices), **sizes)


def tpu_slice(name: str) -> Slice:
    """Returns the slice of a name such as v5p:8x8x16.

    Raises:
      UserError: the name is malformed, no such slice exists, or libtpu is not installed.
    """
    match = _NAME.match(name)
    if match is None or match[1] not in CHIPS:
        raise UserError(
            f"--topology={name} is unknown; it is a chip and the chips in each dimension, such as v5p:8x8x16. "
            f"Chips: {', '.join(CHIPS)}."
        )
    chip, torus = CHIPS[match[1]], tuple(int(n) for n in match[2].split("x"))
    if len(torus) != chip.torus_dims:
        raise UserError(f"--topology={name}: {chip.name} slices have {chip.torus_dims} dimensions, not {len(torus)}.")
    try:
        import libtpu  # noqa: F401  # pyright: ignore[reportMissingImports]  # optional
    except ImportError as error:
        raise UserError(
            "libtpu, which contains the compiler for TPUs, is not installed; it needs no TPU: "
            'pip install "composer_jax[tpu]"'
        ) from error
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0].partition(": ")[2] or str(error)  # libtpu's error without its code
        raise UserError(f"--topology={name} does not exist: {reason}") from error
    return Slice(name, chip, torus, tuple(devices))
