"""The metrics of a training step, before the devices have finished it."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """Metrics of a step that the devices may not have finished yet."""

    arrays: dict[str, Any]
    """Sums and maxima of the loss, grad_norm and skipped, float32 []; "counts", where the network has experts: tokens
    per expert by stack, float32 [L,E]."""
    learning_rate: float

    def fetch(self) -> dict[str, float]:
        """Waits for the step and returns its metrics; `Learner.step` lists them."""
        arrays = dict(self.arrays)
        counts = arrays.pop("counts", None)
        metrics = {name: float(value) for name, value in arrays.items()} | {"learning_rate": self.learning_rate}
        if counts is not None:
            metrics["load_imbalance"] = load_imbalance(counts["moe_layers"])
            metrics["router_entropy"] /= max(1.0, sum_counts(counts))
        return metrics


def sum_counts(counts: dict[str, Any]) -> float:
    """Returns the sum of the counts of all stacks."""
    return float(sum(np.asarray(counts_LE).sum(dtype=np.float64) for counts_LE in counts.values()))


def load_imbalance(counts_LE) -> float:
    """Load of the busiest expert over the mean load, averaged over layers; 1 is even load."""
    counts_LE = np.asarray(counts_LE)
    return float((counts_LE.max(-1) / np.maximum(counts_LE.mean(-1), 1e-9)).mean())
