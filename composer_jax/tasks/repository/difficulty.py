"""How hard a task may be, from what can be counted: a number to sort and to sample by until a model was tried on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

# Feature -> (weight, the count at which it contributes two thirds of its weight). The numbers are ours. Their order
# follows what was published about tasks of such kinds: reimplementing is harder than repairing, and several places
# are harder than one.
WEIGHTS = {
    "lines": (0.35, 20.0),
    "files": (0.15, 2.0),
    "entities": (0.15, 3.0),
    "complexity": (0.25, 12.0),
    "fail_to_pass": (0.10, 10.0),
}


@dataclass(frozen=True)
class Difficulty:
    """What was counted.

    lines: to be written, as the difference between what is broken and what is whole has them. files, entities: that
    differ. complexity: cyclomatic, of the entities together. fail_to_pass: tests that fail.
    """

    lines: int
    files: int
    entities: int
    complexity: int
    fail_to_pass: int

    @property
    def estimate(self) -> float:
        """0 (trivial) to 1: the sum over features of weight * (1 - 3 ** (-count / scale)), counts from the second
        file and the second entity on.

        Each feature saturates, so that no single large number makes a task hard; the weights add up to 1.
        """
        counts: Mapping[str, int] = {**asdict(self), "files": self.files - 1, "entities": self.entities - 1}
        return round(
            sum(
                weight * (1 - math.pow(3.0, -max(counts[name], 0) / scale)) for name, (weight, scale) in WEIGHTS.items()
            ),
            4,
        )
