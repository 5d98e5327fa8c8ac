"""Process-wide JAX settings, made before the first array exists."""

import os
from pathlib import Path

import jax

from composer_jax.errors import UserError
from composer_jax.parallel.processes import process_count


def configure_cpu(devices: int) -> None:
    """Splits the CPU into `devices` XLA devices; 0 keeps JAX's number. Has no effect on machines with an accelerator.

    With several processes `devices` is the sum over all of them, so that one config, and its mesh, fits any number.

    XLA's CPU client runs one program per device on a shared thread pool as large as the machine has cores, and a device
    waits inside that pool for the pieces of its own program. With as many devices as threads every thread can be
    waiting: the process stalls for good. Two threads per device leave room (measured: 2 devices on 2 cores stalled at
    once, and never with the larger pool).
    """
    keep = devices == 0
    devices = max(1, devices // process_count())  # the mesh refuses a number that does not divide
    os.environ.setdefault("NPROC", str(2 * max(os.cpu_count() or 1, devices)))
    if jax._src.xla_bridge.backends_are_initialized():
        have = len(jax.devices())
        if jax.default_backend() == "cpu" and have < devices:
            raise UserError(
                f"This process already runs JAX with {have} CPU devices and {devices} are configured; "
                f"start a new process, or set mesh.cpu_devices={have}."
            )
        return
    if not keep:
        jax.config.update("jax_num_cpu_devices", devices)


def use_compilation_cache(folder: Path | None = None) -> None:
    """Keeps compiled programs between processes, unless JAX_COMPILATION_CACHE_DIR says where already."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        folder = folder or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "composer_jax" / "xla"
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
