"""Grading by a repository's test suite.

A fresh sandbox on the pristine repository gets the agent's changes, but for those to tests, test configuration,
plugins and bytecode (protected.py), and the pristine tests on top. Then the tests run, and of each that was asked for
it is known whether it passed: one that is missing, skipped, expected to fail, in error or there twice has failed. What
tested code can and cannot do to its grade is told in suites/judge.py.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.sandbox import Change, SandboxPool
from composer_jax.tasks.grading.result import Grade
from composer_jax.tasks.result_cache import ResultCache, fingerprint_bytes, result_key
from composer_jax.tasks.suites import judge
from composer_jax.tasks.suites.protected import is_protected
from composer_jax.tasks.suites.run import report_bytes, run_test_suite
from composer_jax.tasks.task import Task


def submitted_changes(task: Task, changes: Mapping[str, Change]) -> dict[str, Change]:
    """The changes that count. A folder that was removed leaves its protected files behind."""
    kept = {path: change for path, change in changes.items() if not is_protected(path)}
    removed = tuple(f"{path}/" for path, change in kept.items() if change.kind == "gone")
    if removed:
        kept |= {path: change for path, change in _pristine_tests(task).items() if path.startswith(removed)}
    return kept


def hidden_test_changes(tests: Path | None) -> dict[str, Change]:
    """The files of a folder of tests, as changes that lay them over a workspace."""
    return {} if tests is None else _files_below(tests)


async def grade(
    task: Task, changes: Mapping[str, Change], pool: SandboxPool, cache: ResultCache[Grade] | None
) -> Grade:
    """Grades one submission (see submission.grade). Raises UserError where the pool's limits are too small."""
    kept = await asyncio.to_thread(submitted_changes, task, changes)
    if cache is None:
        return (await _grade(task, kept, pool))[0]
    key = result_key(fingerprint_bytes(kept), ["grade", task.digest])
    return await cache.get(key, lambda: _grade(task, kept, pool))


async def _grade(task: Task, kept: Mapping[str, Change], pool: SandboxPool) -> tuple[Grade, bool]:
    """The grade, and whether it may be kept: not that of a run that hit a limit.

    Raises UserError where the report was cut because the pool's limits are too small for it. Where they are not, what
    is tested has flooded it; that is no reason to stop whoever grades.
    """
    grader = task.grader
    tests = [*grader.fail_to_pass, *grader.pass_to_pass]
    report = await run_test_suite(
        pool,
        task.repository,
        task.packages,
        grader.command,
        timeout_s=grader.timeout_s,
        files={path: text for path, text in task.files.items() if is_protected(path)},
        changes=kept,
        overlay=await asyncio.to_thread(hidden_test_changes, grader.tests),
        tests=tests,
    )
    if report.lost_bytes and pool.limits.output_kb << 10 < report_bytes(tests):
        raise UserError(
            f"the report on the {len(tests)} tests of task {task.id} does not fit into SandboxLimits.output_kb = "
            f"{pool.limits.output_kb}; make the pool with composer_jax.tasks.suites.run.SUITE_LIMITS"
        )
    repaired, held, detail = judge.summarize(report.judged, grader.fail_to_pass, grader.pass_to_pass)
    reward = judge.compute_reward(repaired, held, grader.partial)
    return Grade(reward, {"f2p": repaired, "p2p": held}, detail), not (report.timed_out or report.lost_bytes)


def _pristine_tests(task: Task) -> dict[str, Change]:
    """What is protected in the task's workspace."""
    found = {} if task.repository is None else _files_below(task.repository, only_protected=True)
    for path, text in task.files.items():
        if is_protected(path):
            found[path] = Change("file", text.encode())
    return found


def _files_below(folder: Path, only_protected: bool = False) -> dict[str, Change]:
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if only_protected and not is_protected(name):
            continue
        if path.is_symlink():
            found[name] = Change("link", os.fsencode(path.readlink()), 0o777)
        elif path.is_file():
            found[name] = Change("file", path.read_bytes(), path.stat().st_mode & 0o777)
    return found
