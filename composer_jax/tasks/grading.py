"""Grading: what the agent left behind, judged by cases it never saw, in a sandbox it never touched.

The pristine workspace is laid out anew, only the agent's changes to non-test Python files are applied, and a
script inside calls the functions and reports their values. The expected values stay on this side and are
compared here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from composer_jax.sandbox import SandboxDied, SandboxPool
from composer_jax.tasks import judge
from composer_jax.tasks.cache import ResultCache, result_key
from composer_jax.tasks.task import Task
from composer_jax.tasks.workspace import is_protected

ATTEMPTS = 3  # a sandbox may die under us (infrastructure); one that dies three times in a row is an outage
SCRIPT = "call_cases.py"
SCRIPT_TEXT = Path(__file__).with_name(SCRIPT).read_bytes()


@dataclass(frozen=True)
class Grade:
    """reward: 1.0 iff every hidden case passes. parts: {"hidden": fraction that passes}. detail: one line."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""


def submission(task: Task, final_files: Mapping[str, bytes | str]) -> dict[str, bytes]:
    """The files that are graded: the pristine workspace with the agent's changes to non-test Python files."""
    pristine = {path: _as_bytes(text) for path, text in task.files.items()}
    kept = {path: data for path, data in pristine.items() if is_protected(path)}
    changed = {path: _as_bytes(data) for path, data in final_files.items() if not is_protected(path)}
    return {**kept, **changed}


async def grade(
    task: Task,
    final_files: Mapping[str, bytes | str],
    pool: SandboxPool,
    cache: ResultCache[Grade] | None = None,
) -> Grade:
    """Grades the workspace an episode ended with.

    A case fails when its value is missing, garbled, late, or not of exactly the expected type. Raises
    SandboxDied when the infrastructure failed three times in a row: that is nobody's reward.
    """
    files = submission(task, final_files)
    if cache is None:
        return (await _grade(task, files, pool))[0]
    key = result_key(files, ["grade", task.grader.to_json()])
    return await cache.get(key, lambda: _grade(task, files, pool))


async def _grade(task: Task, files: Mapping[str, bytes], pool: SandboxPool) -> tuple[Grade, bool]:
    calls = json.dumps([case.call for case in task.grader.cases]).encode()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            sandbox = await pool.acquire({**files, SCRIPT: SCRIPT_TEXT})
            try:
                result = await sandbox.run(["python", SCRIPT], stdin=calls, timeout_s=task.grader.timeout_s)
            finally:
                await sandbox.close()
            break
        except SandboxDied:
            if attempt == ATTEMPTS:
                raise
    # Only a run that came to its own end says the same again; one that hit a limit may have been unlucky.
    return _judge(task, result.outcome, result.stdout), result.outcome in ("ok", "nonzero")


def _judge(task: Task, outcome: str, report: str) -> Grade:
    cases = [{"call": case.call, "want": case.want} for case in task.grader.cases]
    failures = judge.failures(cases, report, outcome)
    passed = len(cases) - len(failures)
    detail = f"{passed} of {len(cases)} hidden cases pass"
    if failures:
        detail += f"; first failure: {failures[0]}"
    return Grade(0.0 if failures else 1.0, {"hidden": passed / len(cases)}, detail)


def _as_bytes(content: bytes | str) -> bytes:
    return content.encode() if isinstance(content, str) else bytes(content)
