"""Grades a submission: the changes that an agent made to the workspace of a task."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.sandbox import GONE, Change, SandboxPool
from composer_jax.tasks.grader import CaseGrader, Grader, LogGrader, ScriptGrader, SuiteGrader
from composer_jax.tasks.grading import cases, log, script, suite
from composer_jax.tasks.grading.result import Grade
from composer_jax.tasks.result_cache import EpisodeCache
from composer_jax.tasks.task import Task

# Grader class -> function of (task, its grader, changes, pool, cache).
_GRADE_FUNCTIONS: Mapping[type[Grader], Callable[..., Awaitable[Grade]]] = {
    CaseGrader: cases.grade,
    SuiteGrader: suite.grade,
    ScriptGrader: script.grade,
    LogGrader: log.grade,
}


async def grade(
    task: Task,
    changes: Mapping[str, Change],
    pool: SandboxPool,
    cache: EpisodeCache[Grade] | None = None,
) -> Grade:
    """Grades the workspace in which an episode ended.

    changes: its differences from the task's repository, or from an empty folder without one (Workspace.changes); they
      include the task's own files.
    cache: results of this episode; the same submission to the same grader then runs once.

    Raises SandboxDied when the infrastructure failed three times in a row: the submission then has no reward. Raises
    UserError for a task with an image and a pool of another image or of none.
    """
    if task.image is not None and pool.image != task.image:
        raise UserError(f"task {task.id} needs the image {task.image}; grade it in a container_pool(task)")
    return await _GRADE_FUNCTIONS[type(task.grader)](task, task.grader, changes, pool, cache)


def changes_from_texts(files: Mapping[str, str | None], root: Path | None) -> dict[str, Change]:
    """Returns texts of a repository's files as changes; None deletes. Files keep their permissions at `root`."""
    changes = {}
    for path, text in files.items():
        if text is None:
            changes[path] = GONE
        else:
            original = root and root / path
            mode = original.stat().st_mode & 0o777 if original and original.is_file() else 0o644
            changes[path] = Change("file", text.encode(), mode)
    return changes


def initial_changes(task: Task) -> dict[str, Change]:
    """Returns the changes of a workspace that no agent has touched: the task's own files."""
    return {path: Change("file", text.encode()) for path, text in task.files.items()}
