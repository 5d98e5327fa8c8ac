"""Runs the tests against small faults of the library (mutants.py): each has to make one of them fail.

    python -m tests.mutants [--only NAME ...] [--output results.json]

Works in a copy of the tracked files in a temporary folder. For each mutant pytest runs the test files of its module
(select_tests.py) up to the first failure, first without the tests marked `slow`, then, if nothing fails, the slow ones
of the files that import the module. At the end the tests that failed run once without a mutant: one that fails then
proves nothing, and its mutants are errors. The exit code is 0 if every mutant was killed, 1 if one survived, 2 for an
error.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer_jax.atomic_write import write_atomically
from composer_jax.errors import UserError
from composer_jax.git import read_git
from composer_jax.observe.progress import Progress
from tests.mutants.mutants import MUTANTS, Mutant
from tests.mutants.run_tests import (
    FAILED,
    PASSED,
    MutantResult,
    check_mutants,
    copy_repository,
    failed_tests,
    run_mutant,
    run_pytest,
)

ROOT = Path(__file__).parents[2]


def run_mutants(mutants: Sequence[Mutant], limit_s: float) -> list[MutantResult]:
    """Returns what the tests say about each mutant, in order.

    Raises:
      UserError: a mutant cannot be applied.
    """
    check_mutants(mutants, ROOT)
    results = []
    with tempfile.TemporaryDirectory(prefix="composer-mutants-") as folder:
        copy = Path(folder, "repository")
        copy_repository(ROOT, copy)
        check_mutants(mutants, copy)
        with Progress(len(mutants), "mutants", "mutants") as progress:
            for mutant in mutants:
                results.append(run_mutant(mutant, copy, limit_s))
                survived = sum(result.outcome == "survived" for result in results)
                progress.update(last=f"{mutant.name} {results[-1].outcome}", survived=survived)
        return without_broken_tests(results, copy, limit_s)


def without_broken_tests(results: list[MutantResult], copy: Path, limit_s: float) -> list[MutantResult]:
    """Makes an error of each kill by a test that fails without a mutant, too."""
    tests = sorted({result.test for result in results if result.outcome == "killed"})
    if not tests:
        return results
    code, output = run_pytest(["--maxfail=0", *tests], copy, limit_s)
    broken = failed_tests(output) if code == FAILED else []
    why = "the test fails without the mutant, too"
    if code not in (PASSED, FAILED):
        broken, why = tests, f"without a mutant pytest ended with {code}:\n{output[-2000:]}"
    return [
        dataclasses.replace(result, outcome="error", detail=why) if result.test in broken else result
        for result in results
    ]


def format_results(results: Sequence[MutantResult]) -> str:
    """Returns a table with a line for each mutant, and their numbers by outcome."""
    width = max(len(result.name) for result in results)
    lines = [f"{r.name:<{width}}  {r.outcome:<8}  {r.seconds:7.1f} s  {r.test}".rstrip() for r in results]
    lines += [f"{result.name}: {result.detail}" for result in results if result.detail]
    outcomes = ("killed", "hung", "survived", "error")
    counts = {outcome: sum(result.outcome == outcome for result in results) for outcome in outcomes}
    return "\n".join([*lines, ", ".join(f"{count} {outcome}" for outcome, count in counts.items())])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="Mutants, or areas of them, to run.")
    parser.add_argument("--output", type=Path, help="A .json file that the results are written to.")
    parser.add_argument("--limit", type=float, default=600.0, help="Seconds that a test may take before it has hung.")
    values = parser.parse_args(arguments)
    known = {mutant.name for mutant in MUTANTS} | {mutant.area for mutant in MUTANTS}
    if unknown := [name for name in values.only if name not in known]:
        parser.error(f"there is no mutant and no area {unknown[0]!r}; tests/mutants/mutants.py has their names.")
    mutants = [m for m in MUTANTS if not values.only or {m.name, m.area} & set(values.only)]
    try:
        commit = read_git("rev-parse", "HEAD", cwd=ROOT).decode().strip()
        has_changes = bool(read_git("status", "--porcelain", "--untracked-files=no", cwd=ROOT).strip())
        results = run_mutants(mutants, values.limit)
        if values.output:
            report: dict[str, Any] = {"commit": commit, "has_uncommitted_changes": has_changes}
            report["mutants"] = [dataclasses.asdict(result) for result in results]
            write_atomically(values.output, f"{json.dumps(report, indent=2)}\n".encode())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(format_results(results))
    outcomes = {result.outcome for result in results}
    return 2 if "error" in outcomes else int("survived" in outcomes)


if __name__ == "__main__":
    sys.exit(main())
