"""Llama 3's rotary scaling, recovered from the tensor in which GGUF files store its result.

transformers describes it by four numbers; the frequency f of a pair, which has the wavelength w = 2 pi / f, becomes

    f                      if w < original / high
    f / factor             if w > original / low
    ((1 - s) / factor + s) f, s = (original / w - low) / (high - low), between

llama.cpp stores the divisors of f, one per pair (Llama 3.1's rope scaling: arXiv 2407.21783, section 3.4.3, and
`_compute_llama3_parameters` of transformers).
"""

import math
from typing import Any

import numpy as np

ROPE_FACTORS = "rope_freqs.weight"
_TOLERANCE = 1e-4  # relative; the tensor is float32, and the numbers that explain it are whole


def llama3_scaling(divisors: np.ndarray, theta: float, width: int) -> dict[str, Any] | None:
    """Returns rope_scaling of config.json, or None if no `llama3` scaling explains the divisors.

    Only two ratios of the numbers `original`, `low` and `high` matter, so that low_freq_factor is 1, as published.

    Args:
      divisors: [P/2] divisor of the frequency of each rotary pair.
      theta: base of the frequencies.
      width: P, rotated numbers of a head.
    """
    if divisors.shape != (width // 2,) or not np.isfinite(divisors).all() or (divisors < 1).any():
        return None
    divisors = divisors.astype(np.float64)
    factor = float(np.round(divisors.max(), 4))
    wavelengths = 2 * math.pi * theta ** (np.arange(0, width, 2) / width)
    between = (divisors > 1 + _TOLERANCE) & (divisors < factor * (1 - _TOLERANCE))
    if factor == 1 or between.sum() < 2:
        return None
    # s is linear in 1/w: s = slope / w + offset, with slope = original / (high - 1) and offset = -1 / (high - 1).
    s = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
    slope, offset = np.polyfit(1 / wavelengths[between], s, 1)
    if offset >= 0:
        return None
    high = float(np.round(1 - 1 / offset, 2))
    original = round(slope * (high - 1))
    if original < 1 or high <= 1:
        return None
    expected = _divisors(wavelengths, factor, high, original)
    if not np.allclose(divisors, expected, rtol=_TOLERANCE):
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _divisors(wavelengths: np.ndarray, factor: float, high: float, original: int) -> np.ndarray:
    """Returns the divisors of a scaling with low_freq_factor 1."""
    s = np.clip((original / wavelengths - 1) / (high - 1), 0, 1)
    return 1 / ((1 - s) / factor + s)
