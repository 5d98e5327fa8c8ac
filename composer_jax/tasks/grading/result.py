"""The result of grading one submission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Grade:
    """reward: 0 to 1. parts: its components, each 0 to 1: {"hidden"} is the fraction of hidden cases that pass,
    {"f2p", "p2p"} the fractions of fail-to-pass and pass-to-pass tests that pass. detail: one line for people."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""
