"""Process-wide JAX settings, applied before the first array exists.

Importing this module also shortens what JAX logs of a plugin that cannot start.
"""

import functools
import logging
import os
from pathlib import Path

import jax
from jax._src import compiler, xla_bridge

from composer_jax.errors import UserError
from composer_jax.parallel.processes import process_count


def configure_cpu(devices: int) -> None:
    """Splits the CPU into `devices` XLA devices; 0 keeps JAX's number. Has no effect on machines with an accelerator.

    `devices` is the sum over all processes, so that one config, and its mesh, fits any number of processes.

    XLA's CPU client gives the operations of all devices to one pool, by default of one thread per core. An operation
    that waits inside that pool for tasks of its own, as JAX's factorisation of a stack of matrices does, keeps a thread
    from them. Once every thread waits, the process stalls for good. demo/induction.py therefore factorises one matrix
    at a time, and two threads per device leave room for other operations of this kind.

    Raises:
      UserError: JAX already runs in this process with fewer CPU devices.
    """
    per_process = max(1, devices // process_count())  # MeshConfig.make_mesh refuses a number that does not divide
    os.environ.setdefault("NPROC", str(2 * max(os.cpu_count() or 1, per_process)))
    if xla_bridge.backends_are_initialized():
        available = len(jax.devices())
        if jax.default_backend() == "cpu" and available < per_process:
            raise UserError(
                f"This process already runs JAX with {available} CPU devices and {per_process} are configured; "
                f"start a new process, or set mesh.cpu_devices={available}."
            )
        return
    if devices:
        jax.config.update("jax_num_cpu_devices", per_process)


def use_compilation_cache(folder: Path | None = None) -> None:
    """Keeps compiled programs on disk between processes.

    Args:
      folder: None is ~/.cache/composer_jax/xla (or under XDG_CACHE_HOME). The environment variable
        JAX_COMPILATION_CACHE_DIR takes precedence over both.
    """
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        folder = folder or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "composer_jax" / "xla"
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@functools.cache
def compile_cpu_meshes_anew() -> None:
    """Lets JAX's compilation cache neither keep nor return programs for several CPU devices.

    XLA's CPU client runs the collectives of a program in one order on all devices, because each of them uses the same
    resource. A program that comes from the cache has another resource inside a loop than outside (in XLA's source:
    `WhileThunkFromProto`, which reads the loop's body with a reader of its own). Then two devices start two collectives
    in different orders, and each waits for the other for good.
    """
    compile_or_read = compiler.compile_or_get_cached

    @functools.wraps(compile_or_read)
    def compile_program(backend, computation, devices, compile_options, host_callbacks, executable_devices, *others):
        if backend.platform == "cpu" and devices.size > 1:
            return compiler.backend_compile_and_load(
                backend, computation, executable_devices, compile_options, host_callbacks
            )
        return compile_or_read(
            backend, computation, devices, compile_options, host_callbacks, executable_devices, *others
        )

    compiler.compile_or_get_cached = compile_program


def _shorten_plugin_error(record: logging.LogRecord) -> bool:
    """Replaces the traceback in JAX's record about a plugin by the error's own text, and lets the record pass.

    This happens with the extra "gpu" on a machine without a driver, where JAX goes on with the CPU.
    """
    if record.exc_info and "plugin" in str(record.msg):
        record.msg, record.args = f"{record.getMessage()}: {record.exc_info[1]}", ()
        record.exc_info = None
    return True


logging.getLogger(xla_bridge.__name__).addFilter(_shorten_plugin_error)
