"""Which functions each test of a repository runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.sandbox import SandboxPool
from composer_jax.tasks.repository.baseline_run import TIMEOUT_S, BaselineRun
from composer_jax.tasks.suites.protected import is_protected
from composer_jax.tasks.suites.run import file_of_test, run_test_suite

TRACER = Path(__file__).with_name("trace_calls.py").read_text(encoding="utf-8")
TRACING_SLOWDOWN = 20.0  # how many times longer a traced run may take


async def trace_calls(
    baseline: BaselineRun, pool: SandboxPool, timeout_s: float | None = None
) -> dict[str, frozenset[str]]:
    """For every reliable test, the ids "path::Qual.name" (see entities.py) of the code that it runs, except test code.

    A class counts as run when one of its methods is.
    timeout_s: of the run; by default 20 times the duration without tracing, at least two minutes.
    Raises UserError when the traced suite does not run to its end.
    """
    report = await run_test_suite(
        pool,
        baseline.root,
        baseline.packages,
        baseline.command,
        timeout_s=timeout_s or max(TIMEOUT_S, TRACING_SLOWDOWN * baseline.seconds),
        tests=baseline.tests,
        tracer=TRACER,
    )
    if report.problem:
        raise UserError(f"the suite of {baseline.root} does not run when it is traced: {report.problem}")
    return {test: add_enclosing(report.calls.get(test, ())) for test in baseline.tests}


def add_enclosing(calls: Iterable[str]) -> frozenset[str]:
    """The functions that are not test code, and the classes and functions around them."""
    names = set()
    for call in calls:
        path, _, name = call.partition("::")
        if is_protected(file_of_test(call)):
            continue
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            if parts[end - 1] != "<locals>":
                names.add(f"{path}::{'.'.join(parts[:end])}")
    return frozenset(names)
