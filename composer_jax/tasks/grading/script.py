"""Grading by a task's own script, as Harbor and Terminal-Bench do it.

A fresh sandbox gets the pristine repository, all of the agent's changes (the task's own files included unless the agent
deleted them), and the tests at /tests. Whatever the agent's sandbox wrote outside the workspace, reward files above
all, is absent. `bash /tests/test.sh` runs. The reward is then read from /logs/verifier/reward.json (a number,
{"reward": a number, other numbers}, or one metric of any name, which is the reward), else from reward.txt. A reward
outside 0 to 1 counts as 0: clamping would turn the result of a script that counts to 100 into full marks.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from composer_jax.sandbox import Change, RunResult, Sandbox, SandboxPool
from composer_jax.tasks.grader import ScriptGrader
from composer_jax.tasks.grading.result import Grade, cached_grade, grade_in_sandbox
from composer_jax.tasks.result_cache import EpisodeCache
from composer_jax.tasks.retry import apply_layers
from composer_jax.tasks.task import Task

REWARD_FILES = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
READ_TIMEOUT_S = 10.0


async def grade(
    task: Task,
    grader: ScriptGrader,
    changes: Mapping[str, Change],
    pool: SandboxPool,
    cache: EpisodeCache[Grade] | None,
) -> Grade:
    """Grades one submission (see submission.grade). A missing or malformed reward is 0, with the cause in `detail`."""
    variables = [f"{name}={value}" for name, value in grader.environment.items()]

    async def acquire() -> Sandbox:
        folders = (task.repository, task.packages, grader.tests)
        repository, packages, tests = [await pool.trees.get(folder) for folder in folders]
        sandbox = await pool.acquire({}, repository, network=task.network, packages=packages, tests=tests)
        return await apply_layers(sandbox, changes)

    async def run(sandbox: Sandbox) -> tuple[Grade, bool]:
        async with sandbox:
            result = await sandbox.run(["env", *variables, "bash", "/tests/test.sh"], timeout_s=grader.timeout_s)
            if result.outcome not in ("ok", "nonzero"):
                return Grade(0.0, {}, f"test.sh did not come to its end: {result.outcome}"), False
            return await _read_reward_files(sandbox, result), True

    return await cached_grade(cache, changes, [task.digest], lambda: grade_in_sandbox(acquire, run))


async def _read_reward_files(sandbox: Sandbox, script: RunResult) -> Grade:
    """Returns the grade from the first reward file that exists. script: the finished run of test.sh."""
    for path in REWARD_FILES:
        content = await sandbox.run(["cat", path], timeout_s=READ_TIMEOUT_S)
        if content.outcome == "ok":
            return read_reward(content.stdout, path)
        if "No such file" not in content.stderr:
            return Grade(0.0, {}, f"{path} cannot be read: {content.stderr.strip() or content.outcome}")
    last_line = (script.stderr.strip() or script.stdout.strip()).splitlines()[-1:] or ["nothing"]
    return Grade(
        0.0, {}, f"test.sh left no reward; its exit code is {script.exit_code}, its last words: {last_line[0][:200]}"
    )


def read_reward(text: str, path: str) -> Grade:
    """Returns the grade in the text of a reward file (.json or .txt)."""
    try:
        value: Any = json.loads(text) if path.endswith(".json") else float(text)
    except (ValueError, RecursionError):
        return Grade(0.0, {}, f"{path} holds no reward: {text.strip()[:80]!r}")
    parts = {}
    if isinstance(value, dict):
        parts = {name: float(part) for name, part in value.items() if name != "reward" and _is_finite_number(part)}
        if "reward" not in value and len(value) > 1:
            names = ", ".join(map(repr, value))
            return Grade(0.0, parts, f"{path} has the metrics {names[:200]} and none of them is 'reward'")
        value = value.get("reward", next(iter(value.values()), None))
    if not _is_finite_number(value):
        return Grade(0.0, parts, f"{path} holds no reward: {text.strip()[:80]!r}")
    if not 0 <= value <= 1:
        return Grade(0.0, parts, f"{path} holds the reward {value}, which is not from 0 to 1 and counts as 0")
    return Grade(float(value), parts, f"test.sh says {float(value)}")


def _is_finite_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer larger than any float
        return False
