"""Grading by a repository's test suite.

A fresh sandbox gets the pristine repository, the agent's changes except those to tests, test configuration, plugins and
bytecode (suites/protected.py), and the pristine tests on top. Then the requested tests run. suites/judge.py says which
outcomes count as passed, and what tested code can do to its grade.
"""

import asyncio
from collections.abc import Mapping

from composer_jax.errors import UserError
from composer_jax.sandbox import Change, SandboxPool
from composer_jax.tasks.grader import SuiteGrader
from composer_jax.tasks.grading.result import Grade, cached_grade
from composer_jax.tasks.patches.git_diff import read_folder
from composer_jax.tasks.result_cache import EpisodeCache
from composer_jax.tasks.suites import judge
from composer_jax.tasks.suites.protected import is_protected
from composer_jax.tasks.suites.run import report_bytes, run_test_suite
from composer_jax.tasks.task import Task


def submitted_changes(task: Task, changes: Mapping[str, Change]) -> dict[str, Change]:
    """Returns the changes that are graded. The protected files of a removed folder are restored."""
    submitted = {path: change for path, change in changes.items() if not is_protected(path)}
    removed = tuple(f"{path}/" for path, change in submitted.items() if change.kind == "gone")
    if removed:
        own = {path: Change("file", text.encode()) for path, text in task.files.items() if is_protected(path)}
        pristine = read_folder(task.repository, is_protected) | own
        submitted |= {path: change for path, change in pristine.items() if path.startswith(removed)}
    return submitted


async def grade(
    task: Task,
    grader: SuiteGrader,
    changes: Mapping[str, Change],
    pool: SandboxPool,
    cache: EpisodeCache[Grade] | None,
) -> Grade:
    """Grades one submission (see submission.grade). Raises UserError if the pool's limits are too small."""
    submitted = await asyncio.to_thread(submitted_changes, task, changes)
    return await cached_grade(cache, submitted, [task.digest], lambda: _grade(task, grader, submitted, pool))


async def _grade(
    task: Task, grader: SuiteGrader, submitted: Mapping[str, Change], pool: SandboxPool
) -> tuple[Grade, bool]:
    """Returns the grade and whether it may be cached: not after a limit was hit, which another run may not hit.

    Raises UserError if the report was truncated because the pool's limits are too small for it. If they are large
    enough, the tested code flooded the report; that fails the submission and not the caller.
    """
    tests = [*grader.fail_to_pass, *grader.pass_to_pass]
    report = await run_test_suite(
        pool,
        task.repository,
        task.packages,
        grader.command,
        timeout_s=grader.timeout_s,
        files={path: text for path, text in task.files.items() if is_protected(path)},
        changes=submitted,
        overlay=await asyncio.to_thread(read_folder, grader.tests),
        tests=tests,
    )
    if report.lost_bytes and pool.limits.output_kb << 10 < report_bytes(tests):
        raise UserError(
            f"the report on the {len(tests)} tests of task {task.id} does not fit into SandboxLimits.output_kb = "
            f"{pool.limits.output_kb}; make the pool with composer_jax.tasks.suites.run.SUITE_LIMITS"
        )
    repaired, kept, detail = judge.summarize(report.judged, grader.fail_to_pass, grader.pass_to_pass)
    reward = judge.compute_reward(repaired, kept, grader.partial)
    return Grade(reward, {"f2p": repaired, "p2p": kept}, detail), not (report.timed_out or report.lost_bytes)
