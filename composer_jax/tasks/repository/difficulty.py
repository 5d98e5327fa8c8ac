"""An estimate of a task's difficulty from counts, to sort and to sample by until a model has been tried on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

# Feature -> (weight, the count at which it contributes two thirds of its weight). The numbers are ours; their order
# follows published results on such tasks: reimplementing is harder than repairing, several places are harder than one.
WEIGHTS = {
    "lines": (0.35, 20.0),
    "files": (0.15, 2.0),
    "entities": (0.15, 3.0),
    "complexity": (0.25, 12.0),
    "fail_to_pass": (0.10, 10.0),
}


@dataclass(frozen=True)
class Difficulty:
    """The counts of a task.

    lines: removed ones, which the solution has to write. files, entities: changed ones. complexity: cyclomatic, summed
    over the entities. fail_to_pass: failing tests.
    """

    lines: int
    files: int
    entities: int
    complexity: int
    fail_to_pass: int

    @property
    def estimate(self) -> float:
        """0 (trivial) to 1: the sum over features of weight * (1 - 3 ** (-count / scale)).

        The first file and the first entity do not count. Each feature saturates, so that no single large number makes
        a task hard; the weights add up to 1.
        """
        counts: Mapping[str, int] = {**asdict(self), "files": self.files - 1, "entities": self.entities - 1}
        return round(
            sum(
                weight * (1 - math.pow(3.0, -max(counts[name], 0) / scale)) for name, (weight, scale) in WEIGHTS.items()
            ),
            4,
        )
