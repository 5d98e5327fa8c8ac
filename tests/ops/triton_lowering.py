"""Lowers Triton kernels of Pallas for CUDA in a process without a GPU."""

import sys

from jax.experimental.pallas import triton as plgpu

from composer_jax.ops.local_gpu import LocalGpu


def pretend_gpu(monkeypatch, gpu: LocalGpu) -> None:
    """Makes attention over pages choose its form for a GPU, and JAX lower kernels for it."""
    monkeypatch.setattr("composer_jax.ops.cached_attention.local_gpu", lambda: gpu)
    if hasattr(plgpu, "get_gpu_info"):  # JAX 0.11 asks the device
        major, minor = gpu.capability
        info = plgpu.GpuInfo(gpu_version=None, arch_name=f"{major}.{minor}", compute_capability=10 * major + minor)
        monkeypatch.setitem(sys.modules[plgpu.GpuInfo.__module__].registry, "cpu", lambda: info)
