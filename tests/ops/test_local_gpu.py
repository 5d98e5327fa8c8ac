import types

import jax
import pytest

from composer_jax.ops import local_gpu as module
from composer_jax.ops.local_gpu import LocalGpu, local_gpu


@pytest.fixture(autouse=True)
def fresh():
    local_gpu.cache_clear()
    yield
    local_gpu.cache_clear()


def device(platform: str, version: str, kind: str, capability: str):
    client = types.SimpleNamespace(platform_version=version)
    return types.SimpleNamespace(platform=platform, client=client, device_kind=kind, compute_capability=capability)


def test_a_gpu_is_described_by_what_jax_says_of_the_first_device(monkeypatch):
    h100 = device("gpu", "PJRT C API\ncuda 12090", "NVIDIA H100 80GB HBM3", "9.0")
    monkeypatch.setattr(module.jax, "local_devices", lambda: [h100])
    monkeypatch.setattr(
        "jax._src.lib.cuda_versions", types.SimpleNamespace(cudnn_get_version=lambda: 91002), raising=True
    )
    assert local_gpu() == LocalGpu("NVIDIA H100 80GB HBM3", (9, 0), 91002)


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        ("--xla_gpu_deterministic_ops=true", True),
        ("--xla_dump_to=/tmp/x --xla_gpu_exclude_nondeterministic_ops", True),
        ("--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=false", False),
        ("--xla_gpu_autotune_level=0", False),
        ("", False),
    ],
)
def test_xlas_flags_ask_for_sums_in_a_fixed_order(monkeypatch, flags, asked):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(module.jax, "local_devices", lambda: [device("gpu", "cuda 12090", "Tesla T4", "7.5")])
    gpu = local_gpu()
    assert gpu is not None and gpu.deterministic == asked


def test_a_gpu_without_the_cuda_plugin_has_no_cudnn(monkeypatch):
    monkeypatch.setattr(module.jax, "local_devices", lambda: [device("gpu", "cuda 12090", "Tesla T4", "7.5")])
    monkeypatch.setattr("jax._src.lib.cuda_versions", None)
    assert local_gpu() == LocalGpu("Tesla T4", (7, 5), None)


@pytest.mark.parametrize("other", [("gpu", "PJRT C API\nrocm 70000", "AMD Instinct MI300X", "gfx942"), None])
def test_other_devices_are_no_gpu(monkeypatch, other):
    if other is not None:
        monkeypatch.setattr(module.jax, "local_devices", lambda: [device(*other)])
    assert jax.default_backend() == "cpu"
    assert local_gpu() is None
