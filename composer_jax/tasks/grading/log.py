"""Grading by the log that a script prints, as SWE-bench does it: inside the task's image, for any language.

    >>>>> Start Test Output      only the lines between these two markers count
    >>>>> End Test Output
    >>>>> Test Exit Code: 0      must agree with them

suites/judge.py says which outcomes count as passed (COUNTS_AS_PASSED). A test that the log does not name has failed,
unless the grader is `fail_only`. A log that cannot be trusted gives reward 0: its markers are missing or repeated, it
names no test, the names of its tests are too long, the script reports that it could not run, or the exit code is a
failure although every test in the log passed.
"""

import asyncio
import re
from collections.abc import Mapping

from composer_jax.sandbox import Change, Sandbox, SandboxPool
from composer_jax.tasks.grader import LogGrader
from composer_jax.tasks.grading.log_parsers import NamesTooLongError, parse
from composer_jax.tasks.grading.result import Grade, cached_grade, grade_in_sandbox
from composer_jax.tasks.result_cache import EpisodeCache
from composer_jax.tasks.retry import apply_layers
from composer_jax.tasks.suites.judge import FAILED, MISSING, PASSED, find_failed, outcome_of, passed_fraction
from composer_jax.tasks.task import Task

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
_EXIT_CODE = re.compile(r"^>>>>> Test Exit Code:\s*(-?\d{1,9})\s*$", re.MULTILINE)
_GAVE_UP = (">>>>> Patch Apply Failed", ">>>>> Reset Failed", ">>>>> Tests Errored", ">>>>> Tests Timed Out")
LOG_KB = 32 * 1024  # a longer log is not judged: the part left out could hold a failure
_SCRIPT = "/tmp/composer-eval.sh"


async def grade(
    task: Task,
    grader: LogGrader,
    changes: Mapping[str, Change],
    pool: SandboxPool,
    cache: EpisodeCache[Grade] | None,
) -> Grade:
    """Grades one submission (see submission.grade). pool: containers of the task's image."""

    async def acquire() -> Sandbox:
        return await apply_layers(await pool.acquire({}, grading=True, network=task.network), changes)

    async def run(sandbox: Sandbox) -> tuple[Grade, bool]:
        async with sandbox:
            # stdout and stderr share one stream: `set -x` prints the markers on stderr, the tests print on stdout.
            store = f"cat > {_SCRIPT} && exec bash {_SCRIPT} 2>&1 < /dev/null"
            result = await sandbox.run(
                ["sh", "-c", store], timeout_s=grader.timeout_s, stdin=grader.script.encode(), output_kb=LOG_KB
            )
            if result.outcome not in ("ok", "nonzero"):
                return Grade(0.0, {}, f"the script did not come to its end: {result.outcome}"), False
            if result.truncated_bytes:
                detail = f"the log is too long, {result.truncated_bytes} bytes of it were left out"
                return Grade(0.0, {}, detail), True
            return await asyncio.to_thread(judge_log, grader, result.stdout), True

    return await cached_grade(cache, changes, [task.digest], lambda: grade_in_sandbox(acquire, run))


def judge_log(grader: LogGrader, log: str) -> Grade:
    """Returns the grade of a log. parts: {"f2p", "p2p"}, the fractions of those tests that pass."""
    between, problem = _between_markers(log)
    if problem:
        return Grade(0.0, {}, f"the log counts for nothing: {problem}")
    try:
        outcomes = parse(grader.parser, between)
    except NamesTooLongError as error:
        return Grade(0.0, {}, f"the log counts for nothing: {error}")
    codes = _EXIT_CODE.findall(log)
    if len(codes) > 1:
        return Grade(0.0, {}, "the log counts for nothing: it has more than one exit code")
    code = int(codes[0]) if codes else None
    if not outcomes and not (grader.fail_only and code == 0):
        return Grade(0.0, {}, "the log counts for nothing: it names no test, so nothing shows that a suite ran")
    if code and outcomes and FAILED not in outcomes.values():
        return Grade(0.0, {}, f"the log counts for nothing: the exit code is {code}, but every test in it has passed")
    missing = PASSED if grader.fail_only else MISSING
    f2p, p2p = grader.fail_to_pass, grader.pass_to_pass
    unrepaired = find_failed(outcomes, f2p, "fail_to_pass", missing)
    broken = find_failed(outcomes, p2p, "pass_to_pass", missing)
    parts = {"f2p": passed_fraction(f2p, unrepaired), "p2p": passed_fraction(p2p, broken)}
    detail = f"{len(f2p) - len(unrepaired)} of {len(f2p)} tests repaired, {len(p2p) - len(broken)} of {len(p2p)} kept"
    if unrepaired or broken:
        first = (broken or unrepaired)[0]
        detail += f"; first: {first} {outcome_of(outcomes, first, missing)}"
    return Grade(float(not unrepaired and not broken), parts, detail)


def _between_markers(log: str) -> tuple[str, str | None]:
    """Returns the lines between the markers, and the problem if there is one.

    A marker may be printed once and traced by `set -x` once.
    """
    if gave_up := next((message for message in _GAVE_UP if message in log), None):
        return "", f"it says {gave_up.removeprefix('>>>>> ')!r}"
    lines = log.split("\n")
    positions = []
    for marker in (START, END):
        here = [number for number, line in enumerate(lines) if marker in line]
        traced = [number for number in here if lines[number].startswith("+")]
        if not here:
            return "", f"it lacks the line {marker!r}"
        if len(traced) > 1 or len(here) - len(traced) > 1:
            return "", f"it has the line {marker!r} more than once"
        positions.append(max(here) if marker == START else min(here))
    if positions[0] > positions[1]:
        return "", "its end is before its start"
    return "\n".join(lines[positions[0] + 1 : positions[1]]), None
