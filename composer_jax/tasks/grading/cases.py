"""Grading by hidden cases: functions are called in a sandbox, and what they return is compared outside.

The tests of the task and the agent's non-test Python files are laid out anew, and a script inside calls the functions
and reports their values. The expected values stay on this side and are compared here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from composer_jax.sandbox import Change, RunResult, SandboxPool
from composer_jax.tasks.grading import judge_cases
from composer_jax.tasks.grading.result import Grade
from composer_jax.tasks.result_cache import ResultCache, fingerprint_bytes, result_key
from composer_jax.tasks.retry import retry_if_sandbox_dies
from composer_jax.tasks.task import Task
from composer_jax.tasks.workspace import is_submitted

SCRIPT = "call_cases.py"
SCRIPT_TEXT = Path(__file__).with_name(SCRIPT).read_bytes()


def submitted_changes(task: Task, changes: Mapping[str, Change]) -> dict[str, Change]:
    """What is graded: the tests of the task, and what other Python files the workspace holds, or lost."""
    kept = {path: Change("file", text.encode()) for path, text in task.files.items() if not is_submitted(path)}
    counted = ("file", "gone") if task.repository else ("file",)  # on nothing, what is gone is not there
    left = {path: change for path, change in changes.items() if change.kind in counted and is_submitted(path)}
    return {**kept, **left}


async def grade(
    task: Task, changes: Mapping[str, Change], pool: SandboxPool, cache: ResultCache[Grade] | None
) -> Grade:
    """Grades one submission (see submission.grade).

    A case fails when its value is missing, garbled, late, or not of exactly the expected type.
    """
    kept = submitted_changes(task, changes)
    if cache is None:
        return (await _grade(task, kept, pool))[0]
    key = result_key(
        fingerprint_bytes(kept), ["grade", task.grader.to_json(), str(task.repository), str(task.packages)]
    )
    return await cache.get(key, lambda: _grade(task, kept, pool))


async def _grade(task: Task, kept: Mapping[str, Change], pool: SandboxPool) -> tuple[Grade, bool]:
    calls = json.dumps([case.call for case in task.grader.cases]).encode()

    async def run() -> RunResult:
        tree, packages = await pool.trees.get(task.repository), await pool.trees.get(task.packages)
        async with await pool.acquire({}, tree, packages=packages) as sandbox:
            await sandbox.apply({**kept, SCRIPT: Change("file", SCRIPT_TEXT)})
            return await sandbox.run(["python", SCRIPT], stdin=calls, timeout_s=task.grader.timeout_s)

    result = await retry_if_sandbox_dies(run)
    # Only a run that came to its own end says the same again; one that hit a limit may have been unlucky.
    return _judge(task, result.outcome, result.stdout), result.outcome in ("ok", "nonzero")


def _judge(task: Task, outcome: str, report: str) -> Grade:
    cases = [{"call": case.call, "want": case.want} for case in task.grader.cases]
    failures = judge_cases.failures(cases, report, outcome)
    passed = len(cases) - len(failures)
    detail = f"{passed} of {len(cases)} hidden cases pass"
    if failures:
        detail += f"; first failure: {failures[0]}"
    return Grade(0.0 if failures else 1.0, {"hidden": passed / len(cases)}, detail)
