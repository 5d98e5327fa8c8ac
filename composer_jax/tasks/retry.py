"""Runs that are repeated when their sandbox dies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from composer_jax.sandbox import SandboxDied

T = TypeVar("T")

ATTEMPTS = 3  # a sandbox may die under us (infrastructure); one that dies three times in a row is an outage


async def retry_if_sandbox_dies(run: Callable[[], Awaitable[T]]) -> T:
    """What `run` returns, which takes a sandbox of its own; tried again when the sandbox dies.

    Raises SandboxDied when that happened ATTEMPTS times in a row.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return await run()
        except SandboxDied:
            continue
    return await run()
