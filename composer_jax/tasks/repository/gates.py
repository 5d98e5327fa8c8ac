"""The gates that a candidate must pass to become a task. A gate gives the same verdict and detail in every run.

collects        pytest collects the tests as before; a test module may fail to import only where the candidate removed
                a name that it imports
in time         no limit was reached
fails           at least one test fails, and all failures come from the code
keeps           enough tests still pass
leaks           the removed code can be read nowhere (leaks.py)
no-op           the task's own grader gives the broken repository 0, and the same tests pass as in the run before
gold            the grader gives the original code 1
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from composer_jax.sandbox import Change, SandboxPool
from composer_jax.tasks.grading import changes_from_texts, grade, initial_changes
from composer_jax.tasks.repository.baseline_run import BaselineRun
from composer_jax.tasks.repository.candidate import Candidate
from composer_jax.tasks.repository.leaks import ReadableFiles, find_installed_copies
from composer_jax.tasks.suites.judge import ENDED_BY_CODE, MISSING, PASSED, SKIPPED, XFAILED, XPASSED
from composer_jax.tasks.suites.run import SuiteReport, file_of_test, run_test_suite
from composer_jax.tasks.task import Task

REMOVING_KINDS = ("delete_feature", "delete_file", "revert_commit", "combine")
IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError", "AttributeError")
ENVIRONMENT_ERRORS = ("KeyboardInterrupt", "MemoryError", "SystemExit", "Timeout", "TimeoutError", "TimeoutExpired")
_NO_FAILURE = (PASSED, XPASSED, SKIPPED, XFAILED, ENDED_BY_CODE, MISSING)
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
_TYPE = re.compile(r"(?:E\s+)?(?:[\w.]*\.)?(\w+)(?::|$)")


@dataclass(frozen=True)
class Gate:
    """The verdict of one gate."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Breakage:
    """The effect of a candidate on the suite.

    failures: failing test -> message. gates: in order; the first failed gate is the last.
    """

    failures: Mapping[str, str]
    pass_to_pass: tuple[str, ...]
    gates: tuple[Gate, ...]

    @property
    def passed(self) -> bool:
        return all(gate.passed for gate in self.gates)


async def break_suite(
    candidate: Candidate, baseline: BaselineRun, pool: SandboxPool, readable: ReadableFiles, min_passing: int
) -> Breakage:
    """Runs the suite on the broken repository and checks the gates that need no task.

    readable: the files of the baseline's root and packages. min_passing: tests that must still pass.
    """
    report = await run_test_suite(
        pool,
        baseline.root,
        baseline.packages,
        baseline.command,
        timeout_s=baseline.timeout_s,
        changes=changes_from_texts(candidate.files, baseline.root),
        tests=baseline.tests,
    )
    failures = {test: failure_message(test, report) for test in baseline.tests if test not in report.passed}
    passing = tuple(test for test in baseline.tests if test in report.passed)
    gates = []
    for gate in (
        lambda: Gate(
            "in time", not report.timed_out, report.problem or "" if report.timed_out else "no limit was reached"
        ),
        lambda: _collects(candidate, report),
        lambda: _fails(report, failures),
        lambda: Gate("keeps", len(passing) >= min_passing, f"{len(passing)} tests still pass, {min_passing} must"),
        lambda: _leaks(candidate, baseline, readable),
    ):
        gates.append(gate())
        if not gates[-1].passed:
            break
    return Breakage(failures, passing, tuple(gates))


async def grade_noop_and_gold(task: Task, gold: Mapping[str, Change], pool: SandboxPool) -> list[Gate]:
    """The gates "no-op" and "gold": the task's grader on the broken and on the original repository."""
    unchanged = await grade(task, initial_changes(task), pool)
    same = unchanged.parts == {"f2p": 0.0, "p2p": 1.0}
    gates = [Gate("no-op", unchanged.reward == 0.0 and same, mask_addresses(unchanged.detail))]
    if gates[0].passed:
        repaired = await grade(task, {**initial_changes(task), **gold}, pool)
        gates.append(Gate("gold", repaired.reward == 1.0, mask_addresses(repaired.detail)))
    return gates


def failure_message(test: str, report: SuiteReport) -> str:
    """The message of a test that did not pass, or that of its file."""
    result = report.tests.get(test)
    if result is not None:
        return mask_addresses(result.message)
    return mask_addresses(report.uncollected.get(file_of_test(test), ""))


def mask_addresses(message: str) -> str:
    """The message with the addresses of objects masked, because they differ between runs."""
    return _ADDRESS.sub("0x...", message)


def exception_type(message: str) -> str | None:
    """The type of the exception in a message of pytest; None for an empty message."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return None
    if lines[0].startswith("assert"):
        return "AssertionError"
    # Of a file that cannot be imported, the last line of the traceback names the type.
    candidates = [line for line in reversed(lines) if line.startswith("E ")] or lines[:1]
    match = _TYPE.match(candidates[0])
    return match[1] if match else "Failed"


def _collects(candidate: Candidate, report: SuiteReport) -> Gate:
    if report.problem:
        return Gate("collects", False, report.problem)
    for file, message in report.uncollected.items():
        error = exception_type(message)
        if candidate.kind not in REMOVING_KINDS or error not in IMPORT_ERRORS:
            return Gate("collects", False, f"{file} cannot be imported: {error}")
    detail = f"{len(report.tests)} tests; {len(report.uncollected)} files import removed names"
    return Gate("collects", True, detail)


def _fails(report: SuiteReport, failures: Mapping[str, str]) -> Gate:
    if not failures:
        return Gate("fails", False, "no test fails")
    reasons: dict[str, int] = {}
    for test, message in failures.items():
        result = report.tests.get(test)
        if result is not None and result.outcome in _NO_FAILURE:
            return Gate("fails", False, f"{test} does not fail, it is {result.outcome}")
        error = exception_type(message)
        if error is None or error in ENVIRONMENT_ERRORS:
            return Gate("fails", False, f"{test} fails for {error or 'no reason: it is not collected'}")
        reasons[error] = reasons.get(error, 0) + 1
    listed = ", ".join(f"{count} {error}" for error, count in sorted(reasons.items()))
    return Gate("fails", True, f"{len(failures)} tests fail: {listed}")


def _leaks(candidate: Candidate, baseline: BaselineRun, readable: ReadableFiles) -> Gate:
    """Searches the files that the agent will see: the scrubbed repository with the changes, and the packages."""
    # A mutation moves lines, so a line removed in one place may be in another of the same file.
    moves = candidate.kind.startswith("mutate:") or candidate.kind == "combine"
    changed = {baseline.root / path: None if moves else text for path, text in candidate.files.items()}
    leaks = find_installed_copies(baseline.packages, baseline.import_names)
    leaks = leaks or readable.find_leaks(candidate.removed, replacements=changed)
    if leaks:
        return Gate("leaks", False, f"{leaks[0].path}: {leaks[0].what}")
    return Gate("leaks", True, "removed lines are nowhere else")
