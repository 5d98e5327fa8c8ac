"""Grading by hidden cases: a sandbox calls functions, and this process compares the values they return.

The fresh workspace holds the task's tests and the agent's other Python files. A script inside it calls the functions
and reports their values. The expected values never enter the sandbox.
"""

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from composer_jax.sandbox import Change, Sandbox, SandboxPool
from composer_jax.tasks.grader import CaseGrader
from composer_jax.tasks.grading import judge_cases
from composer_jax.tasks.grading.result import Grade, cached_grade, grade_in_sandbox
from composer_jax.tasks.result_cache import EpisodeCache
from composer_jax.tasks.retry import apply_layers
from composer_jax.tasks.suites.protected import is_protected
from composer_jax.tasks.task import Task

SCRIPT = "call_cases.py"
SCRIPT_SOURCE = Path(__file__).with_name(SCRIPT).read_bytes()
_NOT_SUBMITTED = ("run_tests.py", SCRIPT)


def is_submitted(path: str) -> bool:
    """Whether changes to `path` are graded: those to Python files that do not belong to the tests."""
    return path.endswith(".py") and PurePosixPath(path).name not in _NOT_SUBMITTED and not is_protected(path)


def submitted_changes(task: Task, changes: Mapping[str, Change]) -> dict[str, Change]:
    """Returns the graded changes: the task's own tests, and the Python files that the agent wrote or deleted."""
    tests = {path: Change("file", text.encode()) for path, text in task.files.items() if not is_submitted(path)}
    kinds = ("file", "gone") if task.repository else ("file",)  # without a repository there is nothing to delete
    submitted = {path: change for path, change in changes.items() if change.kind in kinds and is_submitted(path)}
    return {**tests, **submitted}


async def grade(
    task: Task,
    grader: CaseGrader,
    changes: Mapping[str, Change],
    pool: SandboxPool,
    cache: EpisodeCache[Grade] | None,
) -> Grade:
    """Grades one submission (see submission.grade).

    A case fails when its value is missing, garbled, late, or not of exactly the expected type. All cases fail when the
    changes cannot be applied: a folder replaces one of the task's files, or the workspace is full.
    """
    submitted = submitted_changes(task, changes)

    async def acquire() -> Sandbox:
        tree, packages = await pool.trees.get(task.repository), await pool.trees.get(task.packages)
        sandbox = await pool.acquire({}, tree, packages=packages)
        return await apply_layers(sandbox, {**submitted, SCRIPT: Change("file", SCRIPT_SOURCE)})

    async def run(sandbox: Sandbox) -> tuple[Grade, bool]:
        calls = json.dumps([case.call for case in grader.cases]).encode()
        async with sandbox:
            result = await sandbox.run(["python", SCRIPT], stdin=calls, timeout_s=grader.timeout_s)
        return _judge(grader, result.outcome, result.stdout), result.outcome in ("ok", "nonzero")

    what = [grader.to_json(), str(task.repository), str(task.packages)]
    return await cached_grade(cache, submitted, what, lambda: grade_in_sandbox(acquire, run, {"hidden": 0.0}))


def _judge(grader: CaseGrader, outcome: str, report: str) -> Grade:
    cases = [{"call": case.call, "want": case.want} for case in grader.cases]
    failures = judge_cases.failures(cases, report, outcome)
    passed = len(cases) - len(failures)
    detail = f"{passed} of {len(cases)} hidden cases pass"
    if failures:
        detail += f"; first failure: {failures[0]}"
    return Grade(0.0 if failures else 1.0, {"hidden": passed / len(cases)}, detail)
