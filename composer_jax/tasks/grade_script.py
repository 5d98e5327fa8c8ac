"""Grading by a task's own script, Harbor's contract."""

from __future__ import annotations

from collections.abc import Mapping

from composer_jax.sandbox import Change, SandboxPool
from composer_jax.tasks.cache import ResultCache
from composer_jax.tasks.grade import Grade
from composer_jax.tasks.task import Task


async def grade(
    task: Task, changes: Mapping[str, Change], pool: SandboxPool, cache: ResultCache[Grade] | None
) -> Grade:
    """Grades one submission. Is written elsewhere and replaces this file."""
    raise NotImplementedError(f"task {task.id} is graded by a script, which this version cannot run")
