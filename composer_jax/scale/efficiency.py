"""The fractions of a chip's peak figures that programs reach."""

import dataclasses


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
