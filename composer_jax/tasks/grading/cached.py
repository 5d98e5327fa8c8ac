"""Grades that an episode computes once: the same submission to the same task gets the stored one."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from composer_jax.sandbox import Change
from composer_jax.tasks.grading.result import Grade
from composer_jax.tasks.result_cache import EpisodeCache, fingerprint_bytes, result_key


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
      grade: returns the grade and whether it may be cached.
    """
    if cache is None:
        return (await grade())[0]
    return await cache.get(result_key(fingerprint_bytes(submitted), ["grade", *what]), grade)
