"""Grading by what a script prints, as SWE-bench does it: inside the image of the task, for any language.

    >>>>> Start Test Output      only what is between these two counts
    >>>>> End Test Output
    >>>>> Test Exit Code: 0      must agree with it

A test that failed before has to be PASSED (or XFAIL); one that passed before may also be SKIPPED. Whatever the log
lacks has failed, unless the row says that it names failures only. A log that cannot be trusted is worth nothing:
markers that are missing or are there twice, no test in it, a script that says that it could not work, or an exit code
of a failure although every test that it names has passed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from composer_jax.sandbox import Change, SandboxFileError, SandboxPool
from composer_jax.tasks.grader import LogGrader
from composer_jax.tasks.grading.log_parsers import FAILED, PASSED, SKIPPED, XFAIL, parse
from composer_jax.tasks.grading.result import Grade
from composer_jax.tasks.result_cache import ResultCache, fingerprint_bytes, result_key
from composer_jax.tasks.retry import retry_if_sandbox_dies
from composer_jax.tasks.task import Task

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
_EXIT_CODE = re.compile(r"^>>>>> Test Exit Code:\s*(-?\d+)\s*$", re.MULTILINE)
_GAVE_UP = (">>>>> Patch Apply Failed", ">>>>> Reset Failed", ">>>>> Tests Errored", ">>>>> Tests Timed Out")
LOG_KB = 32 * 1024  # a longer log is not judged: what is cut out could hold a failure
_SCRIPT = "/tmp/composer-eval.sh"


async def grade(
    task: Task, changes: Mapping[str, Change], pool: SandboxPool, cache: ResultCache[Grade] | None
) -> Grade:
    """Grades one submission (see submission.grade). pool: of the task's image."""
    if cache is None:
        return (await _grade(task, changes, pool))[0]
    key = result_key(fingerprint_bytes(changes), ["grade", task.digest])
    return await cache.get(key, lambda: _grade(task, changes, pool))


async def _grade(task: Task, changes: Mapping[str, Change], pool: SandboxPool) -> tuple[Grade, bool]:
    """The grade, and whether it may be kept: not that of a run that hit a limit."""
    grader = task.grader

    async def run() -> tuple[Grade, bool]:
        async with await pool.acquire({}, grading=True, network=task.network) as sandbox:
            try:
                await sandbox.apply(changes)
            except SandboxFileError as error:
                return Grade(0.0, {}, f"the changes cannot be made: {error}"), True
            # One stream: the markers may come on stderr (set -x), what is between them on stdout.
            store = f"cat > {_SCRIPT} && exec bash {_SCRIPT} 2>&1 < /dev/null"
            result = await sandbox.run(
                ["sh", "-c", store], timeout_s=grader.timeout_s, stdin=grader.script.encode(), output_kb=LOG_KB
            )
            if result.outcome not in ("ok", "nonzero"):
                return Grade(0.0, {}, f"the script did not come to its end: {result.outcome}"), False
            if result.truncated_bytes:
                lost = f"the log is too long, {result.truncated_bytes} bytes of it were left out"
                return Grade(0.0, {}, lost), True
            return judge_log(grader, result.stdout), True

    return await retry_if_sandbox_dies(run)


def judge_log(grader: LogGrader, log: str) -> Grade:
    """The grade that a log stands for. parts: {"f2p", "p2p"}, the fractions that were repaired and kept."""
    between, problem = _between_markers(log)
    if problem:
        return Grade(0.0, {}, f"the log counts for nothing: {problem}")
    found = parse(grader.parser, between)
    codes = _EXIT_CODE.findall(log)
    if len(codes) > 1:
        return Grade(0.0, {}, "the log counts for nothing: it has more than one exit code")
    code = int(codes[0]) if codes else None
    if not found and not (grader.fail_only and code == 0):
        return Grade(0.0, {}, "the log counts for nothing: it names no test, so nothing shows that a suite ran")
    if code and found and FAILED not in found.values():
        return Grade(0.0, {}, f"the log counts for nothing: the exit code is {code}, but every test in it has passed")
    repaired = [_status(found, test, grader.fail_only) in (PASSED, XFAIL) for test in grader.fail_to_pass]
    kept = [_status(found, test, grader.fail_only) in (PASSED, XFAIL, SKIPPED) for test in grader.pass_to_pass]
    parts = {"f2p": sum(repaired) / len(repaired), "p2p": sum(kept) / len(kept) if kept else 1.0}
    detail = f"{sum(repaired)} of {len(repaired)} tests repaired, {sum(kept)} of {len(kept)} kept"
    return Grade(float(all(repaired + kept)), parts, detail)


def _status(found: Mapping[str, str], test: str, fail_only: bool) -> str:
    """What became of a test. A parametrized id that the data set has cut off (its [ is never closed) stands for all ids
    that begin so, if they agree."""
    if test in found:
        return found[test]
    if "[" in test and not test.endswith("]"):
        same = {status for name, status in found.items() if name.startswith(test)}
        if len(same) == 1:
            return same.pop()
        if same:
            return FAILED
    return PASSED if fail_only else FAILED


def _between_markers(log: str) -> tuple[str, str | None]:
    """The part of a log that counts, or why none does. A marker may be printed, or traced by `set -x`, once."""
    if gave_up := next((words for words in _GAVE_UP if words in log), None):
        return "", f"it says {gave_up.removeprefix('>>>>> ')!r}"
    lines = log.split("\n")
    places = []
    for marker in (START, END):
        here = [number for number, line in enumerate(lines) if marker in line]
        traced = [number for number in here if lines[number].startswith("+")]
        if not here:
            return "", f"it lacks the line {marker!r}"
        if len(traced) > 1 or len(here) - len(traced) > 1:
            return "", f"it has the line {marker!r} more than once"
        places.append(max(here) if marker == START else min(here))
    if places[0] > places[1]:
        return "", "its end is before its start"
    return "\n".join(lines[places[0] + 1 : places[1]]), None
