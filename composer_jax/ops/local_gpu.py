"""The GPU of this process: what a kernel must know of it before it is traced."""

import functools
import os
from typing import NamedTuple

import jax


class LocalGpu(NamedTuple):
    kind: str
    """What jax calls the kind of its devices, such as "NVIDIA H100 80GB HBM3"."""
    capability: tuple[int, int]
    """CUDA compute capability: (9, 0) is Hopper."""
    cudnn: int | None
    """Version of the cuDNN that JAX loaded, as cudnnGetVersion writes it: 91002 is 9.10.2. None where it has none."""
    deterministic: bool = False
    """Whether XLA_FLAGS asks for operations that sum in a fixed order."""


@functools.cache
def local_gpu() -> LocalGpu | None:
    """Returns this process's first NVIDIA GPU; None where JAX's default backend is another one.

    The first call starts JAX's backends, so jax.distributed and parallel/platform.py come first.
    """
    device = jax.local_devices()[0]
    # AMD's GPUs have the platform "gpu" too; their "capability" is a name such as gfx942.
    if device.platform != "gpu" or "cuda" not in device.client.platform_version:
        return None
    from jax._src.lib import cuda_versions  # None where JAX's CUDA plugin is not installed

    major, minor = map(int, device.compute_capability.split("."))
    cudnn = None if cuda_versions is None else cuda_versions.cudnn_get_version()
    return LocalGpu(device.device_kind, (major, minor), cudnn, asks_for_a_fixed_order(os.environ.get("XLA_FLAGS", "")))


def asks_for_a_fixed_order(xla_flags: str) -> bool:
    """Returns whether XLA_FLAGS sets one of the flags that make operations on a GPU deterministic."""
    values = {name: value for name, _, value in (flag.lstrip("-").partition("=") for flag in xla_flags.split())}
    names = "xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops"
    return any(values.get(name, "false").lower() in ("", "true", "1") for name in names)
