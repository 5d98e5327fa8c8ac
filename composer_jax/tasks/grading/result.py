"""The grade of one submission, an episode's cache of grades, and grading in sandboxes that may die."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from composer_jax.sandbox import Change, Sandbox, SandboxFileError
from composer_jax.tasks.result_cache import EpisodeCache, fingerprint_bytes, result_key
from composer_jax.tasks.retry import retry_if_sandbox_dies


@dataclass(frozen=True)
class Grade:
    """reward: 0 to 1. parts: its components, each 0 to 1: {"hidden"} is the fraction of hidden cases that pass,
    {"f2p", "p2p"} the fractions of fail-to-pass and pass-to-pass tests that pass. detail: one line for people."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""


async def cached_grade(
    cache: EpisodeCache[Grade] | None,
    submitted: Mapping[str, Change],
    what: Sequence[Any],
    grade: Callable[[], Awaitable[tuple[Grade, bool]]],
) -> Grade:
    """Returns the grade of a submission, from the cache where it has one.

    Args:
      cache: None always grades.
      what: JSON values that the grade depends on beside the submission.
      grade: returns the grade and whether it may be cached: not after a limit was hit, which another run may not hit.
    """
    if cache is None:
        return (await grade())[0]
    return await cache.get(result_key(fingerprint_bytes(submitted), ["grade", *what]), grade)


async def grade_in_sandbox(
    acquire: Callable[[], Awaitable[Sandbox]],
    run: Callable[[Sandbox], Awaitable[tuple[Grade, bool]]],
    parts: Mapping[str, float] = MappingProxyType({}),
) -> tuple[Grade, bool]:
    """Returns what `run` returns (see retry_if_sandbox_dies).

    parts: those of a submission whose changes cannot be made; its reward is 0.
    """
    try:
        return await retry_if_sandbox_dies(acquire, run)
    except SandboxFileError as error:
        return Grade(0.0, dict(parts), f"the changes cannot be made: {error}"), True
