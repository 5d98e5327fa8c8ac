"""Runs the test suite of a repository in a fresh sandbox and reports the outcome of every test."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_jax.errors import UserError
from composer_jax.sandbox import Change, Sandbox, SandboxFileError, SandboxLimits, SandboxPool
from composer_jax.tasks.retry import apply_layers, retry_if_sandbox_dies
from composer_jax.tasks.suites import judge
from composer_jax.tasks.suites.protected import FOLDERS, is_protected

DECOYS = 3
SUITE_LIMITS = SandboxLimits(
    cpu_s=600, memory_mb=2048, processes=512, output_kb=8192, open_files=1024, workspace_mb=256, tmp_mb=128
)
"""Limits for every pool in which tasks with a suite are made, validated, played or graded. Our choice."""
_REPORT_BYTES, _TEST_BYTES = 32 << 10, 2 << 10
RUNNER_SOURCE = Path(__file__).with_name("pytest_runner.py").read_text(encoding="utf-8")


@dataclass(frozen=True)
class TestResult:
    """outcome: "passed" or another outcome of judge.py. ms: milliseconds. message: why the test did not pass, starting
    with the type of its exception if there is one."""

    __test__ = False  # keeps pytest from collecting this class

    outcome: str
    ms: int = 0
    message: str = ""


@dataclass(frozen=True)
class SuiteReport:
    """The result of one run of a suite.

    tests: id -> result, in the order of collection. uncollected: file -> why it could not be imported. problem: why
    the whole report counts for nothing, or None. log: the end of the output. calls: id -> functions that the test
    called, if the run was traced. timed_out: the run hit a limit that another run may not hit. lost_bytes: bytes cut
    from the report, if that is the problem. judged: the result of judge.judge_report.
    """

    tests: Mapping[str, TestResult]
    uncollected: Mapping[str, str]
    problem: str | None
    log: str
    calls: Mapping[str, Sequence[str]] = field(default_factory=dict)
    timed_out: bool = False
    lost_bytes: int = 0
    judged: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def passed(self) -> frozenset[str]:
        """Ids of the tests that passed; empty when there is a problem."""
        if self.problem:
            return frozenset()
        return frozenset(test for test, result in self.tests.items() if result.outcome == judge.PASSED)


def report_bytes(tests: Sequence[str]) -> int:
    """Returns a generous bound (ours) on the compressed bytes of a report into which only the plugin writes."""
    return _REPORT_BYTES + _TEST_BYTES * len(tests)


def pytest_arguments(command: Sequence[str]) -> list[str]:
    """Returns the options of a command that runs pytest. Raises UserError for another command."""
    for prefix in (("python", "-m", "pytest"), ("python3", "-m", "pytest"), ("pytest",), ("py.test",)):
        if tuple(command[: len(prefix)]) == prefix:
            return list(command[len(prefix) :])
    raise UserError(
        f"the suite's command {' '.join(command)!r} does not begin with python -m pytest; grade it by a script instead"
    )


def file_of_test(test: str) -> str:
    """Returns the path of the file in a test id."""
    return test.partition("::")[0]


async def run_test_suite(
    pool: SandboxPool,
    repository: Path | None,
    packages: Path | None,
    command: Sequence[str],
    *,
    timeout_s: float,
    files: Mapping[str, bytes | str] | None = None,
    changes: Mapping[str, Change] | None = None,
    overlay: Mapping[str, Change] | None = None,
    tests: Sequence[str] | None = None,
    tracer: str | None = None,
) -> SuiteReport:
    """Runs tests on a repository with `files`, then `changes`, then `overlay` on top of it.

    tests: ids of the tests to run; None: all tests that pytest collects. tracer: source of a plugin (pytest_runner.py).
    Raises what retry_if_sandbox_dies does.
    """
    secret = secrets.token_hex(16)
    order = {
        "arguments": pytest_arguments(command),
        "files": sorted({file_of_test(test) for test in tests or ()}),
        "ids": None if tests is None else list(tests),
        "prefixes": list(filter(judge.is_truncated, tests or ())),
        "secret": secret,
        "decoys": DECOYS,
        "test_folders": FOLDERS,
        "tracer": tracer,
    }
    tree, installed = await pool.trees.get(repository), await pool.trees.get(packages)

    async def acquire() -> Sandbox:
        sandbox = await pool.acquire(files or {}, tree, packages=installed)
        return await apply_layers(sandbox, *(layer for layer in (changes, overlay) if layer))

    async def run(sandbox: Sandbox) -> SuiteReport:
        async with sandbox:
            result = await sandbox.run(
                ["python", "-c", RUNNER_SOURCE], stdin=json.dumps(order).encode(), timeout_s=timeout_s
            )
        judged: dict[str, Any] = judge.judge_report(result.stdout, secret, is_protected, result.outcome)
        lost_bytes = result.truncated_bytes if judged["problem"] else 0
        if lost_bytes:  # not an exception: tested code can make the report long
            judged["problem"] = f"{lost_bytes} bytes of the report are lost; raise SandboxLimits.output_kb"
        log = judged["log"] + result.stderr[-2000:]
        results = {test: TestResult(*entry) for test, entry in judged["tests"].items()}
        timed_out = result.outcome in judge.LIMIT_PROBLEMS
        return SuiteReport(
            results, judged["uncollected"], judged["problem"], log, judged["traced"], timed_out, lost_bytes, judged
        )

    try:
        return await retry_if_sandbox_dies(acquire, run)
    except SandboxFileError as error:
        return SuiteReport({}, {}, f"the changes cannot be made: {error}", "")
