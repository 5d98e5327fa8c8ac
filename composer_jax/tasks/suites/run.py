"""A repository's test suite, run in a fresh sandbox: what every test did."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.sandbox import Change, SandboxFileError, SandboxLimits, SandboxPool
from composer_jax.tasks.retry import retry_if_sandbox_dies
from composer_jax.tasks.suites import judge

DECOYS = 3
SUITE_LIMITS = SandboxLimits(cpu_s=600, memory_mb=2048, output_kb=8192, open_files=1024, workspace_mb=256, tmp_mb=128)
"""What a suite and its report may need: for all pools in which tasks with a suite are made, validated, played, graded.
Ours."""
_REPORT_BYTES, _TEST_BYTES = 32 << 10, 2 << 10
RUNNER_SOURCE = Path(__file__).with_name("pytest_runner.py").read_text(encoding="utf-8")


@dataclass(frozen=True)
class TestResult:
    """outcome: "passed", or one of the other words of judge. ms: milliseconds. message: why it did not pass,
    beginning with the exception's type where there is one."""

    __test__ = False  # pytest takes everything called Test* for a test

    outcome: str
    ms: int = 0
    message: str = ""


@dataclass(frozen=True)
class SuiteReport:
    """What a run of a suite gave.

    tests: id -> result, in the order of collection. uncollected: file -> why it could not be imported. problem: why
    none of it counts, if so. log: the end of what was printed. calls: id -> code that ran, where that was traced.
    timed_out: it hit a limit, and another run may not. lost_bytes: of the report, where that is why none of it counts.
    """

    tests: Mapping[str, TestResult]
    uncollected: Mapping[str, str]
    problem: str | None
    log: str
    calls: Mapping[str, Sequence[str]] = field(default_factory=dict)
    timed_out: bool = False
    lost_bytes: int = 0
    judged: Mapping[str, object] = field(default_factory=dict, repr=False)

    @property
    def passed(self) -> frozenset[str]:
        """Ids of the tests that passed; empty when there is a problem."""
        if self.problem:
            return frozenset()
        return frozenset(test for test, result in self.tests.items() if result.outcome == judge.PASSED)


def report_bytes(tests: Sequence[str]) -> int:
    """How long a report on these tests can be, compressed, unless what is tested writes to it. Ours, and generous."""
    return _REPORT_BYTES + _TEST_BYTES * len(tests)


def pytest_arguments(command: Sequence[str]) -> list[str]:
    """The options of a command that runs pytest. Raises UserError for one that does not."""
    for words in (("python", "-m", "pytest"), ("python3", "-m", "pytest"), ("pytest",), ("py.test",)):
        if tuple(command[: len(words)]) == words:
            return list(command[len(words) :])
    raise UserError(
        f"the suite's command {' '.join(command)!r} does not begin with python -m pytest; grade it by a script instead"
    )


def file_of_test(test: str) -> str:
    """The file of a test id."""
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

    tests: ids of those to run; None: whatever pytest finds. tracer: source of a plugin (see pytest_runner.py).
    Raises SandboxDied when three sandboxes died in a row.
    """
    secret = secrets.token_hex(16)
    order = {
        "arguments": pytest_arguments(command),
        "files": sorted({file_of_test(test) for test in tests or ()}),
        "ids": None if tests is None else list(tests),
        "secret": secret,
        "decoys": DECOYS,
        "tracer": tracer,
    }
    tree, installed = await pool.trees.get(repository), await pool.trees.get(packages)

    async def run() -> SuiteReport:
        async with await pool.acquire(files or {}, tree, packages=installed) as sandbox:
            try:
                for layer in (changes, overlay):
                    if layer:
                        await sandbox.apply(layer)
            except SandboxFileError as error:
                return SuiteReport({}, {}, f"the changes cannot be made: {error}", "")
            result = await sandbox.run(
                ["python", "-c", RUNNER_SOURCE], stdin=json.dumps(order).encode(), timeout_s=timeout_s
            )
        judged = judge.judge_report(result.stdout, secret, result.outcome)
        lost = result.truncated_bytes if judged["problem"] else 0
        if lost:  # not an error here: what is tested can make it long
            judged["problem"] = f"{lost} bytes of the report are lost; raise SandboxLimits.output_kb"
        log = judged["log"] + result.stderr[-2000:]
        results = {test: TestResult(*entry) for test, entry in judged["tests"].items()}
        stopped = result.outcome in judge.LIMIT_PROBLEMS
        return SuiteReport(
            results, judged["uncollected"], judged["problem"], log, judged["traced"], stopped, lost, judged
        )

    return await retry_if_sandbox_dies(run)
