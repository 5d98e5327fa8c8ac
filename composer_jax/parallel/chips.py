"""Peak figures of TPU chips and GPUs. No other file holds such numbers.

Those of TPUs are Google's published specifications (docs.cloud.google.com/tpu/docs, pages v5e, v5p, v6e and tpu7x, read
in November 2026), those of GPUs NVIDIA's data sheets, without sparsity. A *device* is a jax.Device: one chip, except on
TPU7x, where a chip is two devices that share its links.
"""

import dataclasses
from collections.abc import Sequence

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peak figures of one chip; a device has 1/`devices` of each."""

    name: str
    kind: str
    """What jax calls the kind of its devices."""
    peak_flops: float
    """bfloat16 floating-point operations per second."""
    hbm_bandwidth: float
    """Bytes per second."""
    hbm_usable: float
    """Bytes that the compiler lets one *device* use: the limit in libtpu 0.0.51's error about a program that is too
    large."""
    link_bandwidth: float
    """Bytes per second of one link in one direction: the published "bidirectional bandwidth per chip" counts both
    directions of all links (4 links of a 2D torus, 6 of a 3D torus)."""
    torus_dims: int
    devices: int = 1

    def ring_dims(self, torus: Sequence[int]) -> list[bool]:
        """Returns which dimensions of a slice are rings (wrap around).

        v5e and v6e: dimensions of 16 chips, a full pod. v5p and TPU7x: every dimension of a slice of whole 4x4x4 cubes
        ("How to Scale Your Model", jax-ml.github.io/scaling-book/tpus, note on bidirectional bandwidth).
        """
        if self.torus_dims == 2:
            return [size == 16 for size in torus]
        return [all(size % 4 == 0 for size in torus)] * len(torus)


CHIPS = {
    "v5e": Chip("v5e", "TPU v5 lite", 197e12, 819e9, 15.75 * GIB, 400e9 / 8, 2),
    "v5p": Chip("v5p", "TPU v5", 459e12, 2765e9, 95.73 * GIB, 1200e9 / 12, 3),
    "v6e": Chip("v6e", "TPU v6 lite", 918e12, 1638e9, 31.24 * GIB, 800e9 / 8, 2),
    "tpu7x": Chip("tpu7x", "TPU7x", 2307e12, 7380e9, 94.74 * GIB, 1200e9 / 12, 3, devices=2),
}

GPU_PEAK_FLOPS = {
    "A100": 312e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "L4": 121e12,
    "L40S": 362e12,
    "T4": 65e12,
    "V100": 125e12,
}
"""Part of the kind of a device -> bfloat16 floating-point operations per second with float32 sums; float16 for T4 and
V100, which have no bfloat16."""


def peak_flops(kind: str) -> float | None:
    """Returns the peak bfloat16 operations per second of one device, by jax's name of its kind; None for others.

    A part of a GPU (MIG) is one of those.
    """
    for chip in CHIPS.values():
        if chip.kind == kind:
            return chip.peak_flops / chip.devices
    words = kind.replace("-", " ").split()  # such as NVIDIA H100 80GB HBM3 and Tesla V100-SXM2-16GB
    known = [name for name in GPU_PEAK_FLOPS if set(name.split()) <= set(words) and "MIG" not in words]
    return GPU_PEAK_FLOPS[max(known, key=len)] if known else None
