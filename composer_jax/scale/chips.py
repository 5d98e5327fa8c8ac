"""Peak figures of TPU chips and the fractions of them that programs reach. No other file holds such numbers.

Peaks are Google's published specifications (docs.cloud.google.com/tpu/docs, pages v5e, v5p, v6e and tpu7x, read in
November 2026). A *device* is a jax.Device: one chip, except on TPU7x, where a chip is two devices that share its links.
"""

import dataclasses
from collections.abc import Sequence

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peak figures of one chip; a device has 1/`devices` of each."""

    name: str
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
    "v5e": Chip("v5e", 197e12, 819e9, 15.75 * GIB, 400e9 / 8, 2),
    "v5p": Chip("v5p", 459e12, 2765e9, 95.73 * GIB, 1200e9 / 12, 3),
    "v6e": Chip("v6e", 918e12, 1638e9, 31.24 * GIB, 800e9 / 8, 2),
    "tpu7x": Chip("tpu7x", 2307e12, 7380e9, 94.74 * GIB, 1200e9 / 12, 3, devices=2),
}


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """The fraction of a peak that well-shaped work reaches, by kind of Operation. One set for all chips.

    Their ratios are our assumption: at best 0.80 for large products, 0.50 for attention (whose heads do
    not fill the matrix unit, and which computes exponentials), 0.60 for grouped products, 0.85 for HBM (a copy on a
    TPU7x was measured at 3.21 of 3.69 TB/s, github.com/vllm-project/tpu-inference/issues/3520) and 0.80 for links. All
    five are then multiplied by 0.88, which makes the prediction for DeepSeek-V3 on 512 v5p equal the measurement
    (MaxText, 90.668 s, github.com/AI-Hypercomputer/tpu-recipes, training/v5p/DeepSeek3-671B-MaxText).
    `python -m benchmarks.published_steps` compares predictions with that run and with others that were not fitted.
    """

    matmul: float = 0.70
    attention: float = 0.44
    grouped_matmul: float = 0.53
    hbm: float = 0.75
    links: float = 0.70
    hop_seconds: float = 1e-6
    """Latency of one link; an assumption ("How to Scale Your Model" takes 0.5 to 1 microsecond)."""
