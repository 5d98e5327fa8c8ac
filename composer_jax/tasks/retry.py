"""Sandbox runs that are repeated when the sandbox dies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from composer_jax.sandbox import SandboxDied

T = TypeVar("T")

ATTEMPTS = 3  # one death is an accident of the infrastructure; three in a row are an outage


async def retry_if_sandbox_dies(run: Callable[[], Awaitable[T]]) -> T:
    """Awaits `run()`, which acquires its own sandbox, and repeats it when that sandbox dies.

    Raises SandboxDied when ATTEMPTS sandboxes died in a row.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return await run()
        except SandboxDied:
            continue
    return await run()
