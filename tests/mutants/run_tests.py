"""Runs the tests of one mutant in a scratch copy of the repository."""

import contextlib
import dataclasses
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from composer_jax.errors import UserError
from composer_jax.git import read_git
from tests.mutants.mutants import Mutant
from tests.mutants.select_tests import find_tests

PYTEST = ("-m", "pytest", "-x", "-v", "-n", "0", "-p", "no:cacheprovider", "--color=no", "--hypothesis-seed=0")
"""-v instead of -q: it prints a test's name before the test runs, which a test that hangs needs."""
PASSED, FAILED, NO_TESTS = 0, 1, 5
"""Exit codes of pytest; every other one is an error."""
LOOK_EVERY_S = 0.2


@dataclasses.dataclass(frozen=True)
class MutantResult:
    """What the tests said about one mutant."""

    name: str
    outcome: Literal["killed", "hung", "survived", "error"]
    """hung: a test took longer than the limit, which kills the mutant as well. error: pytest did not come to a verdict,
    or the test fails without the mutant, too."""
    test: str
    """Id of the test that killed it; "" if none did. After a hang the last line of pytest: the test that ran, or that
    had just ended."""
    seconds: float
    detail: str = ""
    """What the error was."""


def check_mutants(mutants: Sequence[Mutant], root: Path) -> None:
    """Raises a UserError that names the mutants whose text is not exactly once in their file."""
    problems = []
    for mutant in mutants:
        file = root / mutant.file
        count = file.read_text(encoding="utf-8").count(mutant.old) if file.is_file() else 0
        if count != 1:
            problems.append(f"{mutant.name} ({count} times in {mutant.file})")
    if problems:
        raise UserError(
            f"the text of each mutant has to be exactly once in its file: {', '.join(problems)}; bring `old` and `new` "
            "in tests/mutants/mutants.py to what the code has become."
        )


def copy_repository(root: Path, target: Path) -> None:
    """Copies the tracked files, as they are in the working tree."""
    for name in read_git("ls-files", "-z", cwd=root).decode().split("\0"):
        source, copy = root / name, target / name
        if name and (source.is_symlink() or source.is_file()):  # a tracked file may be deleted here
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)


@contextlib.contextmanager
def applied(mutant: Mutant, copy: Path) -> Iterator[None]:
    """Context in which the file of the copy has the mutant."""
    file = copy / mutant.file
    original = file.read_text(encoding="utf-8")
    # Bytecode counts as current if size and second of its source agree, which they can after so quick a change.
    bytecode = Path(importlib.util.cache_from_source(str(file)))
    try:
        bytecode.unlink(missing_ok=True)
        file.write_text(original.replace(mutant.old, mutant.new), encoding="utf-8")
        yield
    finally:
        file.write_text(original, encoding="utf-8")
        bytecode.unlink(missing_ok=True)


def run_mutant(mutant: Mutant, copy: Path, limit_s: float) -> MutantResult:
    """Runs the quick tests of the mutant's module up to the first failure; if none fails, the slow ones that import it.

    limit_s: seconds that a test may take.
    """
    files, started = find_tests(mutant.file, copy), time.monotonic()
    stages = [("not slow", [*files.importing, *files.others])]
    stages += [("slow", files.importing)] if files.importing else []
    result = MutantResult(mutant.name, "survived", "", 0.0)
    with applied(mutant, copy):
        for marker, paths in stages:
            result = _run_stage(mutant.name, marker, paths, copy, limit_s)
            if result.outcome != "survived":
                break
    return dataclasses.replace(result, seconds=round(time.monotonic() - started, 1))


def _run_stage(name: str, marker: str, paths: Sequence[str], copy: Path, limit_s: float) -> MutantResult:
    code, output = run_pytest(["-m", marker, *paths], copy, limit_s)
    if code is None:
        started = [line.strip() for line in output.splitlines() if line.startswith("tests/") and "::" in line]
        if not started:
            return MutantResult(name, "error", "", 0.0, f"no test began within {limit_s:g} s; raise --limit")
        return MutantResult(name, "hung", started[-1], 0.0)
    if code == FAILED and (tests := failed_tests(output)):
        return MutantResult(name, "killed", tests[0], 0.0)
    if code == PASSED or (code == NO_TESTS and marker == "slow"):
        return MutantResult(name, "survived", "", 0.0)
    return MutantResult(name, "error", "", 0.0, f"pytest ended with {code}:\n{output[-2000:]}")


def failed_tests(output: str) -> list[str]:
    """Returns the ids of the tests that pytest's summary calls failed or broken."""
    words = ("FAILED ", "ERROR ")
    return [line.partition(" ")[2].partition(" - ")[0] for line in output.splitlines() if line.startswith(words)]


def run_pytest(arguments: Sequence[str], copy: Path, limit_s: float) -> tuple[int | None, str]:
    """Returns exit code and output of pytest in the copy; None if it printed nothing for `limit_s` and was killed."""
    hidden = ("PYTHONPATH", "PYTEST_ADDOPTS")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    log = copy.with_name("pytest.log")
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, *PYTEST, *arguments],
            cwd=copy,
            env=environment | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = _wait(process, log, limit_s)
        finally:  # whatever the tests left running; also after Ctrl-C
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, log.read_text(encoding="utf-8", errors="replace")


def _wait(process: subprocess.Popen[bytes], log: Path, limit_s: float) -> int | None:
    """Returns the exit code; None if the log did not grow for `limit_s`."""
    size, grown = 0, time.monotonic()
    while process.poll() is None:
        if (now_size := log.stat().st_size) != size:
            size, grown = now_size, time.monotonic()
        if time.monotonic() - grown > limit_s:
            return None
        time.sleep(LOOK_EVERY_S)
    return process.returncode
