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
SLOWER = 20.0  # how many times longer a traced run may take


async def trace(baseline: BaselineRun, pool: SandboxPool, timeout_s: float | None = None) -> dict[str, frozenset[str]]:
    """Test id -> "path::Qual.name" of the functions that it runs, without those of tests; of every reliable test.

    A class counts as run when a method of it is. Names are those of entities.py.
    timeout_s: of the run, by default 20 times what the suite took without tracing, two minutes at least.
    Raises UserError when the traced suite does not run to its end.
    """
    report = await run_test_suite(
        pool,
        baseline.root,
        baseline.packages,
        baseline.command,
        timeout_s=timeout_s or max(TIMEOUT_S, SLOWER * baseline.seconds),
        tests=baseline.tests,
        tracer=TRACER,
    )
    if report.problem:
        raise UserError(f"the suite of {baseline.root} does not run when it is traced: {report.problem}")
    return {test: with_classes(report.calls.get(test, ())) for test in baseline.tests}


def with_classes(calls: Iterable[str]) -> frozenset[str]:
    """The functions that are not of tests, and the classes and functions that they are defined in."""
    found = set()
    for call in calls:
        path, _, name = call.partition("::")
        if is_protected(file_of_test(call)):
            continue
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            if parts[end - 1] != "<locals>":
                found.add(f"{path}::{'.'.join(parts[:end])}")
    return frozenset(found)
