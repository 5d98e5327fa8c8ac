"""Grading: what the agent left behind, judged by what it never saw, in a sandbox it never touched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.sandbox import GONE, Change, SandboxPool
from composer_jax.tasks.grader import CaseGrader, LogGrader, ScriptGrader, SuiteGrader
from composer_jax.tasks.grading import cases, log, script, suite
from composer_jax.tasks.grading.result import Grade
from composer_jax.tasks.result_cache import ResultCache
from composer_jax.tasks.task import Task

_HOW = {
    CaseGrader: cases.grade,
    SuiteGrader: suite.grade,
    ScriptGrader: script.grade,
    LogGrader: log.grade,
}


async def grade(
    task: Task,
    changes: Mapping[str, Change],
    pool: SandboxPool,
    cache: ResultCache[Grade] | None = None,
) -> Grade:
    """Grades the workspace an episode ended with.

    changes: in what it differs from the task's repository, or from nothing where there is none (Workspace.changes);
      the task's own files are among them.
    cache: may be shared by any number of gradings; the same submission to the same grader is then run once.

    Raises SandboxDied when the infrastructure failed three times in a row: that is nobody's reward. Raises UserError
    for a task with an image and a pool of anything but that image.
    """
    if task.image is not None and pool.image != task.image:
        raise UserError(f"task {task.id} needs the image {task.image}; grade it in a container_pool(task)")
    return await _HOW[type(task.grader)](task, changes, pool, cache)


def changes_from_texts(files: Mapping[str, str | None], root: Path | None) -> dict[str, Change]:
    """Texts of a repository's files as changes; None deletes. The permissions are those of the files at `root`."""
    changes = {}
    for path, text in files.items():
        if text is None:
            changes[path] = GONE
        else:
            there = root and root / path
            mode = there.stat().st_mode & 0o777 if there and there.is_file() else 0o644
            changes[path] = Change("file", text.encode(), mode)
    return changes


def initial_changes(task: Task) -> dict[str, Change]:
    """The changes of a workspace as the agent finds it."""
    return {path: Change("file", text.encode()) for path, text in task.files.items()}
