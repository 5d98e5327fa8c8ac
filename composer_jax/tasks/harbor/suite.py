"""The parts of a Harbor directory that only repository tasks have (directory.py has the rest)."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from composer_jax.errors import UserError
from composer_jax.tasks.grader import SuiteGrader
from composer_jax.tasks.patches import format_unified
from composer_jax.tasks.suites.protected import is_protected, protected_files
from composer_jax.tasks.suites.run import DECOYS, pytest_arguments
from composer_jax.tasks.task import Task

_TASKS = Path(__file__).parents[1]
_SHIPPED = {
    "verify_suite.py": "harbor/verify_suite.py",
    "run_suite.py": "suites/pytest_runner.py",
    "judge_suite.py": "suites/judge.py",
    "protected.py": "suites/protected.py",
}
TEST_SH = "#!/bin/sh\nexec python3 /tests/verify_suite.py /tests /workspace /logs/verifier\n"


def dockerfile(task: Task) -> str:
    """Returns a Dockerfile that installs the requirements in the task's metadata, or pytest without any."""
    requirements = task.metadata.get("requirements") or ["pytest"]
    words = " ".join(f"'{requirement}'" for requirement in requirements)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    steps = (f"FROM python:{version}-slim", f"RUN pip install --no-cache-dir {words}", "COPY repo /workspace")
    return "\n".join([*steps, "WORKDIR /workspace", ""])


def write_suite(task: Task, grader: SuiteGrader, directory: Path) -> dict[str, str]:
    """Copies repository and hidden tests into the directory; returns path -> text of the other files."""
    repo, tests = directory / "environment" / "repo", directory / "tests" / "repo"
    if task.repository is not None:
        shutil.copytree(task.repository, repo, symlinks=True)
    if grader.tests is not None:
        shutil.copytree(grader.tests, tests, symlinks=True)
    protected = _write_protected(task, grader, tests)
    suite = {
        "fail_to_pass": list(grader.fail_to_pass),
        "pass_to_pass": list(grader.pass_to_pass),
        "arguments": pytest_arguments(grader.command),
        "timeout_s": grader.timeout_s,
        "partial": grader.partial,
        "decoys": DECOYS,
    }
    shipped = {f"tests/{name}": (_TASKS / source).read_text(encoding="utf-8") for name, source in _SHIPPED.items()}
    gold = task.metadata.get("gold")
    patch = {} if gold is None else {"solution/gold.patch": gold_patch(task, gold)}
    return {**shipped, **protected, **patch, "tests/suite.json": json.dumps(suite, indent=1), "tests/test.sh": TEST_SH}


def _write_protected(task: Task, grader: SuiteGrader, tests: Path) -> dict[str, str]:
    """Copies the repository's protected files beside the hidden tests, because verify_suite.py removes all others.

    Returns path -> text of the protected files among the task's own files.
    """
    own_files = {path: text for path, text in task.files.items() if is_protected(path)}
    hidden = set() if grader.tests is None else set(protected_files(tests))
    root = task.repository
    originals = {} if root is None else {path: root / path for path in protected_files(root)}
    for path, original in originals.items():
        behind_link = any(str(above) in hidden for above in PurePosixPath(path).parents)
        if path not in hidden and path not in own_files and not behind_link:
            (tests / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(original, tests / path, follow_symlinks=False)
    return {f"tests/repo/{path}": text for path, text in own_files.items() if path not in hidden}


def gold_patch(task: Task, gold: Mapping[str, str | None]) -> str:
    """Returns the solution as a unified diff, for people; solve.sh writes the same texts."""
    pieces = []
    for path, text in sorted(gold.items()):
        original = task.repository / path if task.repository is not None else None
        before = original.read_bytes().decode() if original and original.is_file() else task.files.get(path)
        pieces.append(format_unified(path, before, text))
    return "".join(pieces)


def describe_suite(task: Task, grader: SuiteGrader, directory: Path) -> dict[str, Any]:
    """Returns the entries of [metadata.composer] on the grader and on the packages that the tests need."""
    described: dict[str, Any] = {
        "fail_to_pass": list(grader.fail_to_pass),
        "pass_to_pass": list(grader.pass_to_pass),
        "command": list(grader.command),
        "timeout_s": grader.timeout_s,
        "partial": grader.partial,
        "network": task.network,
    }
    if task.metadata.get("kind"):
        described["kind"] = task.metadata["kind"]
    if task.packages is not None:
        described["packages"] = os.path.relpath(task.packages.resolve(), directory.resolve())
    if task.metadata.get("requirements"):
        described["requirements"] = list(task.metadata["requirements"])
    return described


def read_suite(described: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Returns the Task fields on repository and grader from the entries that describe_suite wrote.

    Raises UserError when the folder of packages does not exist.
    """
    grader = SuiteGrader(
        tuple(described["fail_to_pass"]),
        tuple(described["pass_to_pass"]),
        directory / "tests" / "repo",
        tuple(described["command"]),
        described["timeout_s"],
        described["partial"],
    )
    packages = None
    if "packages" in described:
        packages = Path(os.path.normpath(directory / described["packages"]))
        if not packages.is_dir():
            needed = " ".join(f"'{name}'" for name in described.get("requirements", ["pytest"]))
            raise UserError(
                f"the packages of the task in {directory} are not at {packages}; "
                f"install them with `pip install --target {packages} {needed}`"
            )
    return {
        "grader": grader,
        "repository": directory / "environment" / "repo",
        "packages": packages,
        "network": described["network"],
        "files": {},
    }
