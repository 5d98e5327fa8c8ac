"""The run of a repository's suite before anything is broken: its command, its reliable tests, and their calls.

The suite runs on a copy without files that could hold an answer: caches, builds, history, leftovers.
"""

import configparser
import math
import os
import re
import shutil
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.sandbox import SandboxPool
from composer_jax.tasks.grader import PYTEST
from composer_jax.tasks.repository.entities import outer_ids
from composer_jax.tasks.repository.own_metadata import write_metadata
from composer_jax.tasks.suites.judge import PASSED
from composer_jax.tasks.suites.protected import FOLDERS as TEST_FOLDERS
from composer_jax.tasks.suites.protected import is_protected
from composer_jax.tasks.suites.run import SuiteReport, file_of_test, run_test_suite

RUNS = 3
TIMEOUT_S = 120.0
MARGIN = 4.0  # the time limit of a task's suite as a multiple of the slowest run
STEP_S = 15.0
_OTHER_TEST_FILES = ("test.py", "tests.py")  # is_protected knows them, pytest does not collect them by itself
TRACER = Path(__file__).with_name("trace_calls.py").read_text(encoding="utf-8")
TRACING_SLOWDOWN = 20.0  # how many times longer a traced run may take

# Lines that name what is wrong, the most telling first: pytest's arguments, its configuration, a traceback.
_REASONS = [
    re.compile(pattern)
    for pattern in (
        r"(?:\S+: )?error: (.+)",
        r"ERROR: (?!usage:)(.+)",
        r"SKIPPED \[\d+\] (.+)",
        r"E\s+((?:\w+\.)*\w*(?:Error|Exception|Warning|Found)\b.*)",
        r"((?:\w+\.)*\w*(?:Error|Exception|Warning)\b: .+)",
    )
]
_LINE_CHARACTERS = 300
_LACKS_PACKAGE = re.compile(
    r"unrecognized arguments|No module named|Missing required plugins|fixture '\w+' not found|PackageNotFoundError"
    r"|Unknown config option"
)

SCRUBBED_FOLDERS = (
    "__pycache__",
    ".git",
    ".hg",
    ".svn",
    ".tox",
    ".nox",
    ".venv",
    "venv",
    "node_modules",
    ".eggs",
    ".idea",
    ".vscode",
    ".hypothesis",
    ".ipynb_checkpoints",
    "htmlcov",
    "*_cache",  # .mypy_cache, .pytest_cache, .ruff_cache
    "*.egg-info",
    "*.dist-info",
)
SCRUBBED_TOP_LEVEL_FOLDERS = ("build", "dist", "site", "_build")
SCRUBBED_FILES = (
    "*.pyc",
    "*.pyo",
    "*.orig",
    "*.rej",
    "*.bak",
    "*.swp",
    "*.swo",
    "*~",
    ".coverage",
    ".coverage.*",
    "coverage.xml",
    ".dmypy.json",
    "tags",
    "TAGS",
)
SCRUBBED_FILES_OUTSIDE_TESTS = ("*.egg", "*.whl", "*.patch", "*.diff")  # among tests they are data


@dataclass(frozen=True)
class BaselineRun:
    """A repository and the outcome of its suite.

    root: the scrubbed copy. sources: path -> text of every Python file, tests included. command: runs the suite.
    tests: ids that passed in every run. unreliable: other ids -> the reason. import_names: of the repository's own
    packages. seconds: of the slowest run. uncollected: test file that cannot be imported -> why. packages: folder of
    installed packages. excluded: paths that scrubbing left out. log: the end of the last run's output.
    """

    root: Path
    sources: Mapping[str, str]
    command: tuple[str, ...]
    tests: tuple[str, ...]
    unreliable: Mapping[str, str]
    import_names: tuple[str, ...]
    seconds: float
    uncollected: Mapping[str, str] = field(default_factory=dict)
    packages: Path | None = None
    excluded: tuple[str, ...] = ()
    log: str = field(default="", repr=False)

    @property
    def timeout_s(self) -> float:
        """Time limit of a task's suite in seconds: 30, 60, 120, ...; coarse, because runs differ in time."""
        return STEP_S * 2 ** max(1, math.ceil(math.log2(MARGIN * self.seconds / STEP_S)))


async def run_baseline(
    repository: Path,
    root: Path,
    pool: SandboxPool,
    packages: Path | None,
    *,
    runs: int = RUNS,
    after_run: Callable[[SuiteReport], None] = lambda report: None,
) -> BaselineRun:
    """Copies `repository` to `root`, a new folder, and runs its suite `runs` times.

    after_run: is called with the report of each run.
    Raises UserError when the suite does not run, or no test passes in every run.
    """
    excluded = copy_scrubbed(repository, root)
    write_metadata(repository, root)
    command = suite_command(root)
    reports = []
    for _ in range(runs):
        report = await run_test_suite(pool, root, packages, command, timeout_s=TIMEOUT_S)
        if report.problem:
            reason = find_reason(report)
            raise UserError(f"the suite of {repository} does not run: {report.problem}: {add_remedy(reason)}")
        reports.append(report)
        after_run(report)
    unreliable = find_unreliable_tests(reports)
    tests = tuple(test for test in reports[0].tests if test not in unreliable)
    if not tests:
        first = min(unreliable)
        messages = (report.tests[first].message for report in reports if first in report.tests)
        message = next(filter(None, messages), "")
        reason = add_remedy(f"{first} ({unreliable[first]}): {telling_line(message)}")
        raise UserError(f"no test of {repository} passed in all of {runs} runs; the first: {reason}")
    return BaselineRun(
        root,
        read_python_files(root),
        command,
        tests,
        unreliable,
        own_import_names(root),
        max(sum(result.ms for result in report.tests.values()) / 1000 for report in reports) + 1.0,
        {file: telling_line(message) for file, message in reports[0].uncollected.items()},
        packages,
        tuple(excluded),
        reports[-1].log,
    )


def find_reason(report: SuiteReport) -> str:
    """The line of a suite's output that says why it does not run, such as what pytest or a test file lacks."""
    for file, message in report.uncollected.items():
        return f"{file}: {telling_line(message)}"
    lines = [line.removeprefix("INTERNALERROR>").strip() for line in report.log.splitlines()]
    lines = [line for line in lines if line]
    for pattern in _REASONS:
        for line in reversed(lines):
            if match := pattern.match(line):
                return match[1][:_LINE_CHARACTERS]
    return f"its last line is {lines[-1][:_LINE_CHARACTERS]}" if lines else "it printed nothing"


def telling_line(message: str) -> str:
    """The last line of a message of pytest that it marks as the error, or the last line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no message"]
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (errors or lines)[-1][:_LINE_CHARACTERS]


def add_remedy(reason: str) -> str:
    """The reason, and what to do where a package seems to be missing."""
    return f"{reason}; install what is missing with --requirements" if _LACKS_PACKAGE.search(reason) else reason


def find_unreliable_tests(reports: list[SuiteReport]) -> dict[str, str]:
    """Tests that did not pass in every run or lie outside the test files: id -> reason."""
    unreliable = {}
    for test in dict.fromkeys(test for report in reports for test in report.tests):
        outcomes = [report.tests[test].outcome if test in report.tests else "not collected" for report in reports]
        if not is_protected(file_of_test(test)):
            unreliable[test] = f"{file_of_test(test)} is not a test file, so a repair could change the test"
        elif set(outcomes) != {PASSED}:
            unreliable[test] = ", ".join(outcomes)
    return unreliable


def suite_command(root: Path) -> tuple[str, ...]:
    """The pytest command with the repository's own configuration and no other.

    It makes `src` importable where the configuration does not, and collects tests.py where no other file has tests.
    """
    config, settings = pytest_configuration(root)
    words = [*PYTEST, "--rootdir", "."]
    needs_path = (root / "src").is_dir() and "pythonpath" not in settings
    # pythonpath is relative to the configuration file, so /dev/null cannot replace a missing one.
    if config is not None or not needs_path:
        words += ["-c", config or "/dev/null"]
    if needs_path:
        words += ["-o", "pythonpath=src"]
    if "python_files" not in settings and not any(root.rglob("test_*.py")) and not any(root.rglob("*_test.py")):
        if names := sorted({path.name for path in root.rglob("test*.py") if path.name in _OTHER_TEST_FILES}):
            words += ["-o", f"python_files={' '.join(names)}"]
    return tuple(words)


def pytest_configuration(root: Path) -> tuple[str | None, Mapping[str, object]]:
    """(the file from which pytest takes its configuration, its settings), by pytest's order of precedence.

    Raises UserError for a file that cannot be read.
    """
    for name in ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg"):
        path = root / name
        if not path.is_file():
            continue
        try:
            settings = _settings(path)
        except (configparser.Error, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {error}; repair it or leave it out") from error
        if settings is not None:
            return name, settings
    return None, {}


def _settings(path: Path) -> Mapping[str, object] | None:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        data = tomllib.loads(text)
        if path.name != "pyproject.toml":
            return data.get("pytest", {})
        pytest = data.get("tool", {}).get("pytest")
        return None if pytest is None else {**pytest, **pytest.get("ini_options", {})}
    parser = configparser.RawConfigParser(strict=False)
    parser.read_string(text)
    section = "tool:pytest" if path.name == "setup.cfg" else "pytest"
    if parser.has_section(section):
        return dict(parser[section])
    return {} if path.name.endswith("pytest.ini") else None


def read_python_files(root: Path) -> dict[str, str]:
    """Relative path -> text of every Python file in UTF-8, with its line ends."""
    texts = {}
    for path in sorted(root.rglob("*.py")):
        if path.is_symlink() or not path.is_file():
            continue
        try:
            texts[path.relative_to(root).as_posix()] = path.read_bytes().decode()
        except UnicodeDecodeError:
            continue  # candidates hold UTF-8 texts only
    return texts


def own_import_names(root: Path) -> tuple[str, ...]:
    """Import names of the packages and modules at the top of the repository or of its src folder."""
    names = set()
    for folder in (root, root / "src"):
        for path in folder.glob("*") if folder.is_dir() else ():
            relative = path.relative_to(root).as_posix()
            if is_protected(relative) or path.stem == "setup":
                continue
            if (path / "__init__.py").is_file() or (path.suffix == ".py" and path.is_file()):
                names.add(path.stem)
    return tuple(sorted(names))


def is_scrubbed(path: str, is_folder: bool) -> bool:
    """Whether a relative posix path is left out of a task's workspace."""
    name = path.rpartition("/")[2]
    if is_folder:
        return path in SCRUBBED_TOP_LEVEL_FOLDERS or any(fnmatchcase(name, pattern) for pattern in SCRUBBED_FOLDERS)
    in_tests = any(part in TEST_FOLDERS for part in path.split("/"))
    patterns = SCRUBBED_FILES if in_tests else (*SCRUBBED_FILES, *SCRUBBED_FILES_OUTSIDE_TESTS)
    return name == ".git" or any(fnmatchcase(name, pattern) for pattern in patterns)


def copy_scrubbed(repository: Path, target: Path) -> list[str]:
    """Copies a repository to a new folder; returns the excluded paths, sorted.

    Links that lead out of the repository, pipes and sockets are excluded as well.
    Raises UserError when there is no such repository or the target exists.
    """
    if not repository.is_dir():
        raise UserError(f"{repository} is not a folder; give the root of a repository")
    if target.exists():
        raise UserError(f"{target} is already there; give a new folder")
    excluded = []
    for walked, folders, files in os.walk(repository):
        here = Path(walked)
        (target / here.relative_to(repository)).mkdir(parents=True)
        for name in [*folders, *files]:
            path = here / name
            relative = path.relative_to(repository).as_posix()
            is_folder = path.is_dir() and not path.is_symlink()
            if is_scrubbed(relative, is_folder) or not (is_folder or _can_be_copied(path, repository)):
                excluded.append(relative)
            elif not is_folder:
                shutil.copy2(path, target / relative, follow_symlinks=False)
        folders[:] = [
            name
            for name in folders
            if not (here / name).is_symlink()
            and not is_scrubbed((here / name).relative_to(repository).as_posix(), True)
        ]
    return sorted(excluded)


def _can_be_copied(path: Path, repository: Path) -> bool:
    if path.is_symlink():
        # The target is compared as text, so that the copied link leads into the copy.
        target = Path(os.path.normpath(path.parent / path.readlink()))
        return not path.readlink().is_absolute() and target.is_relative_to(repository)
    return path.is_file()


async def trace_calls(baseline: BaselineRun, pool: SandboxPool) -> dict[str, frozenset[str]]:
    """For every reliable test, the ids "path::Qual.name" (see entities.py) of the code that it runs, except test code.

    A class counts as run when one of its methods is. Raises UserError when the traced suite does not run to its end.
    """
    report = await run_test_suite(
        pool,
        baseline.root,
        baseline.packages,
        baseline.command,
        timeout_s=max(TIMEOUT_S, TRACING_SLOWDOWN * baseline.seconds),
        tests=baseline.tests,
        tracer=TRACER,
    )
    if report.problem:
        raise UserError(f"the suite of {baseline.root} does not run when it is traced: {report.problem}")
    return {test: add_enclosing(report.calls.get(test, ())) for test in baseline.tests}


def add_enclosing(calls: Iterable[str]) -> frozenset[str]:
    """The functions that are not test code, and the classes and functions around them."""
    code = [call for call in calls if not is_protected(file_of_test(call))]
    names = {name for call in code for name in (call, *outer_ids(call))}
    return frozenset(name for name in names if not name.endswith("<locals>"))
