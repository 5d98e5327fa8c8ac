"""Grading by a task's own script, as Harbor and Terminal-Bench do it.

A fresh sandbox on the pristine repository gets all of the agent's changes, the task's own files among them if they are
still there, and sees the tests at /tests; what the agent's own sandbox left outside of the workspace, reward files
above all, is not there. `bash /tests/test.sh` runs, and the
reward is what it then finds in /logs/verifier/reward.json (a number, or {"reward": a number, other numbers}), else in
reward.txt. A reward outside of 0 to 1 counts as none: clamped, a script that counts to 100 would look as if all was
solved.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from composer_jax.sandbox import Change, RunResult, Sandbox, SandboxFileError, SandboxPool
from composer_jax.tasks.grading.result import Grade
from composer_jax.tasks.result_cache import ResultCache, fingerprint_bytes, result_key
from composer_jax.tasks.retry import retry_if_sandbox_dies
from composer_jax.tasks.task import Task

REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
READ_S = 10.0


async def grade(
    task: Task, changes: Mapping[str, Change], pool: SandboxPool, cache: ResultCache[Grade] | None
) -> Grade:
    """Grades one submission (see submission.grade). A reward that is missing or no number is 0, with a sentence."""
    if cache is None:
        return (await _grade(task, changes, pool))[0]
    key = result_key(fingerprint_bytes(changes), ["grade", task.digest])
    return await cache.get(key, lambda: _grade(task, changes, pool))


async def _grade(task: Task, changes: Mapping[str, Change], pool: SandboxPool) -> tuple[Grade, bool]:
    """The grade, and whether it may be kept: not that of a run that hit a limit."""
    grader = task.grader
    trees = {"packages": await pool.trees.get(task.packages), "tests": await pool.trees.get(grader.tests)}
    variables = [f"{name}={value}" for name, value in grader.environment.items()]

    async def run() -> tuple[Grade, bool]:
        ground = await pool.trees.get(task.repository)
        async with await pool.acquire({}, ground, network=task.network, **trees) as sandbox:
            try:
                await sandbox.apply(changes)
            except SandboxFileError as error:
                return Grade(0.0, {}, f"the changes cannot be made: {error}"), True
            result = await sandbox.run(["env", *variables, "bash", "/tests/test.sh"], timeout_s=grader.timeout_s)
            if result.outcome not in ("ok", "nonzero"):
                return Grade(0.0, {}, f"test.sh did not come to its end: {result.outcome}"), False
            return await _reward(sandbox, result), True

    return await retry_if_sandbox_dies(run)


async def _reward(sandbox: Sandbox, script: RunResult) -> Grade:
    """What the files say that test.sh has left."""
    for path in REWARDS:
        found = await sandbox.run(["cat", path], timeout_s=READ_S)
        if found.outcome == "ok":
            return read_reward(found.stdout, path)
        if "No such file" not in found.stderr:
            return Grade(0.0, {}, f"{path} cannot be read: {found.stderr.strip() or found.outcome}")
    said = (script.stderr.strip() or script.stdout.strip()).splitlines()[-1:] or ["nothing"]
    return Grade(
        0.0, {}, f"test.sh left no reward; its exit code is {script.exit_code}, its last words: {said[0][:200]}"
    )


def read_reward(text: str, path: str) -> Grade:
    """The grade that a reward file (.json or .txt) stands for."""
    try:
        value: Any = json.loads(text) if path.endswith(".json") else float(text)
    except (ValueError, RecursionError):
        return Grade(0.0, {}, f"{path} holds no reward: {text.strip()[:80]!r}")
    parts = {}
    if isinstance(value, dict):
        parts = {name: float(part) for name, part in value.items() if name != "reward" and _is_number(part)}
        value = value.get("reward")
    if not _is_number(value):
        return Grade(0.0, parts, f"{path} holds no reward: {text.strip()[:80]!r}")
    if not 0 <= value <= 1:
        return Grade(0.0, parts, f"{path} holds the reward {value}, which is not from 0 to 1 and counts as 0")
    return Grade(float(value), parts, f"test.sh says {float(value)}")


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer larger than any float
        return False
