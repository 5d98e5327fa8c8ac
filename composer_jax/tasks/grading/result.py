"""What grading says about a submission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Grade:
    """reward: 0 to 1. parts: what it is made of, each 0 to 1: {"hidden"} is the fraction of hidden cases that pass,
    {"f2p", "p2p"} that of the tests which were to be repaired and to be kept. detail: one line."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""
