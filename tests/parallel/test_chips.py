"""Peak figures by what jax calls a device."""

import pytest

from composer_jax.parallel.chips import peak_flops


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v5 lite", 197e12),
        ("TPU7x", 2307e12 / 2),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Tesla T4", 65e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce GTX 480", None),
        ("cpu", None),
    ],
)
def test_the_peak_of_a_device(kind, peak):
    assert peak_flops(kind) == peak
