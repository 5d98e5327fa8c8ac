"""What grading says about a submission."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from composer_jax.sandbox import SandboxDied

T = TypeVar("T")

ATTEMPTS = 3  # a sandbox may die under us (infrastructure); one that dies three times in a row is an outage


@dataclass(frozen=True)
class Grade:
    """reward: 0 to 1. parts: what it is made of, each 0 to 1: {"hidden"} is the fraction of hidden cases that pass,
    {"f2p", "p2p"} that of the tests which were to be repaired and to be kept. detail: one line."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""


async def with_living_sandbox(run: Callable[[], Awaitable[T]]) -> T:
    """What `run` returns, which takes a sandbox of its own; tried again when the sandbox dies.

    Raises SandboxDied when that happened ATTEMPTS times in a row.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return await run()
        except SandboxDied:
            continue
    return await run()
