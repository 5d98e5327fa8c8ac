"""MFU: the share of its devices' peak at which a training step computes (PaLM, arXiv 2204.02311, appendix B)."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from composer_jax.models.config import ModelConfig
from composer_jax.models.flops import training_flops
from composer_jax.parallel.chips import peak_flops


@dataclasses.dataclass(frozen=True)
class Utilisation:
    """Computes the MFU of training steps."""

    config: ModelConfig
    peak: float
    """bfloat16 operations per second of all devices together."""
    trains_mtp: bool = False
    """Whether the MTP modules are in the loss."""
    trains_trunk: bool = True
    """Whether the rest has a backward pass."""

    def mfu(self, lengths: np.ndarray, seconds: float) -> float:
        """Returns the MFU of a step that took `seconds`; padding and recomputation do not count.

        lengths: integers, the tokens of each document (models/flops.py: document_lengths).
        """
        flops = training_flops(self.config, lengths, trains_mtp=self.trains_mtp, trains_trunk=self.trains_trunk)
        return flops / (seconds * self.peak)


def total_peak(kinds: Iterable[str]) -> float | None:
    """Returns the peak operations per second of devices of these kinds together; None if one is not known (CPUs)."""
    peaks = [peak_flops(kind) for kind in kinds]
    return None if None in peaks else float(sum(peak for peak in peaks if peak is not None))
