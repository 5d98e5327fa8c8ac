"""Runs Pallas kernels for Hopper GPUs on a CPU, by JAX's interpreter for them."""

import contextlib
import types

import jax
import jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks as callbacks
from jax._src.interpreters import mlir
from jax._src.pallas.mosaic.interpret import shared_memory, utils
from jax._src.pallas.mosaic_gpu import core
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams, force_gpu_interpret_mode

from composer_jax.ops.local_gpu import LocalGpu

H100 = LocalGpu("NVIDIA H100 80GB HBM3", (9, 0), None)


def pretend_h100(monkeypatch) -> None:
    """Makes grouped products choose their form for an H100."""
    monkeypatch.setattr("composer_jax.ops.hopper_grouped_matmul.local_gpu", lambda: H100)


@contextlib.contextmanager
def interpret_kernels(monkeypatch):
    """Interprets kernels that are traced inside. What a kernel does not write is NaN."""
    if jax.__version_info__ < (0, 11):
        _complete_interpreter(monkeypatch)
    with force_gpu_interpret_mode(InterpretGPUParams(out_of_bounds_reads="uninitialized", uninitialized_memory="nan")):
        yield


def _complete_interpreter(monkeypatch) -> None:
    """Adds to JAX 0.10's interpreter what 0.11's has: transposed operands, layout_cast, and zeros beyond an array."""

    class Transposed(tuple):
        pass

    memory_class = shared_memory.SharedMemory

    def to_range(transforms, original=utils.to_range):
        indexers = [t for t in transforms if hasattr(t, "indices")]
        at = original(indexers)
        return at if len(indexers) == len(transforms) else Transposed(at)

    def get_buffer_content(memory, key, at, *args, original=memory_class.get_buffer_content, **options):
        content, *rest = original(memory, key, at, *args, **options)
        return (content.T if isinstance(at, Transposed) else content, *rest)

    def read_beyond(*args, original=callbacks._handle_out_of_bounds_read):
        args = list(args)
        args[6] = types.SimpleNamespace(out_of_bounds_reads="uninitialized", uninitialized_memory="zero")
        return original(*args)

    monkeypatch.setattr(utils, "to_range", to_range)
    monkeypatch.setattr(memory_class, "get_buffer_content", get_buffer_content)
    monkeypatch.setattr(callbacks, "_handle_out_of_bounds_read", read_beyond)
    mlir.register_lowering(core.layout_cast_p, lambda context, x, **_: [x], platform="cpu")
