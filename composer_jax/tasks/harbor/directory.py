"""Writes and reads tasks as Harbor directories, a format that other harnesses read too.

    task.toml              schema, limits, and [metadata.composer]: id, family, split, tools; for a repository task also
                           kind, fail-to-pass and pass-to-pass tests, and the packages it needs
    instruction.md         the instruction for the agent
    environment/repo/      the workspace; environment/Dockerfile copies it into a container
    tests/                 test.sh and its files, hidden from the agent: hidden cases with their expected values, or the
                           pristine tests of a repository
    solution/              solve.sh, and oracle.json: the metadata of the Task

A task that is written and read back is equal. The repository of a repository task is then the directory it was read
from, and includes the task's own files.
"""

import json
import os
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from composer_jax.errors import UserError
from composer_jax.tasks.grader import CaseGrader, SuiteGrader
from composer_jax.tasks.patches import format_unified
from composer_jax.tasks.suites.protected import is_protected, protected_files
from composer_jax.tasks.suites.run import DECOYS, pytest_arguments
from composer_jax.tasks.task import Task

SCHEMA_VERSION = "1.0"
AGENT_TIMEOUT_S = 600.0
VERIFIER_OVERHEAD_S = 60.0  # to start a container and an interpreter, in addition to the grader's timeout
_TASKS = Path(__file__).parents[1]
_CASE_FILES = {
    "verify.py": "harbor/verify_cases.py",
    "judge.py": "grading/judge_cases.py",
    "call_cases.py": "grading/call_cases.py",
}
_SUITE_FILES = {
    "verify_suite.py": "harbor/verify_suite.py",
    "run_suite.py": "suites/pytest_runner.py",
    "judge_suite.py": "suites/judge.py",
    "protected.py": "suites/protected.py",
}
_DOCKERFILE = "FROM python:3.11-slim\nCOPY repo /workspace\nWORKDIR /workspace\n"
_TEST_SH = "#!/bin/sh\nexec python3 /tests/{} /tests /workspace /logs/verifier\n"
_SOLVE_SH = "#!/bin/sh\nexec python3 /solution/solve.py /solution/oracle.json /workspace\n"


def write_task(task: Task, directory: Path | str) -> Path:
    """Writes `task` into a new or empty directory and returns its path.

    Raises UserError when the directory is not empty, a path leads out of the workspace, or the task has a part that the
    format cannot hold.
    """
    directory = Path(directory)
    if directory.is_dir() and any(directory.iterdir()):
        raise UserError(f"{directory} is not empty; give write_task a new directory")
    if not isinstance(task.grader, CaseGrader | SuiteGrader):
        raise UserError(f"task {task.id} is graded by a script of its own; copy the directory it came from")
    _refuse_unsupported_parts(task)
    files = {f"environment/repo/{_check_path(path)}": text for path, text in task.files.items()}
    if isinstance(task.grader, SuiteGrader):
        directory.mkdir(parents=True, exist_ok=True)
        files |= _write_suite(task, task.grader, directory)
    else:
        files |= _write_cases(task)
    files |= {
        "task.toml": _task_toml(task, directory),
        "instruction.md": task.instruction,
        "solution/solve.sh": _SOLVE_SH,
        "solution/solve.py": (_TASKS / "harbor/solve.py").read_text(encoding="utf-8"),
        "solution/oracle.json": json.dumps(dict(task.metadata), indent=1),
    }
    for path, text in files.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode())  # bytes: no translation of line ends
    return directory


def read_task(directory: Path | str) -> Task:
    """Reads the Task in a directory that `write_task` wrote. Raises UserError that names what is missing or wrong."""
    directory = Path(directory)
    try:
        manifest = tomllib.loads((directory / "task.toml").read_text(encoding="utf-8"))["metadata"]["composer"]
        instruction = (directory / "instruction.md").read_bytes().decode()
        metadata = json.loads((directory / "solution/oracle.json").read_bytes())
        is_suite = "fail_to_pass" in manifest
        rest = _read_suite(manifest, directory) if is_suite else _read_cases(directory)
        return Task(
            id=manifest["id"],
            family=manifest["family"],
            split=manifest["split"],
            instruction=instruction,
            tools=tuple(manifest["tools"]),
            metadata=metadata,
            max_turns=manifest.get("max_turns"),
            **rest,
        )
    except KeyError as error:
        raise UserError(
            f"the task in {directory} lacks {error}; only tasks written by write_task can be read"
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"the task in {directory} cannot be read: {error}") from error


def _refuse_unsupported_parts(task: Task) -> None:
    parts = ("image",) if isinstance(task.grader, SuiteGrader) else ("repository", "packages", "network", "image")
    if unsupported := [name for name in parts if getattr(task, name)]:
        how = "a suite" if isinstance(task.grader, SuiteGrader) else "hidden cases"
        raise UserError(
            f"task {task.id} has {' and '.join(unsupported)}, which a directory of a task graded by {how} cannot hold; "
            "keep it as JSON (Task.to_json)"
        )


def _shipped(files: Mapping[str, str]) -> dict[str, str]:
    """Returns path in the directory -> text of files of this package; the first of them grades."""
    texts = {f"tests/{name}": (_TASKS / source).read_text(encoding="utf-8") for name, source in files.items()}
    return texts | {"tests/test.sh": _TEST_SH.format(next(iter(files)))}


def _write_cases(task: Task) -> dict[str, str]:
    cases = json.dumps(task.grader.to_json(), indent=1)
    return {**_shipped(_CASE_FILES), "tests/cases.json": cases, "environment/Dockerfile": _DOCKERFILE}


def _read_cases(directory: Path) -> dict[str, Any]:
    repo = directory / "environment" / "repo"
    files = {
        path.relative_to(repo).as_posix(): path.read_bytes().decode()
        for path in sorted(repo.rglob("*"))
        if path.is_file()
    }
    grader = CaseGrader.from_json(json.loads((directory / "tests/cases.json").read_bytes()))
    return {"files": files, "grader": grader}


def _check_path(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or "\0" in path:
        raise UserError(f"the workspace path {path!r} leads out of the workspace; use a relative path without ..")
    return path


def _task_toml(task: Task, directory: Path) -> str:
    tables: dict[str, dict[str, Any]] = {
        "": {"schema_version": SCHEMA_VERSION},
        "task": {"name": f"composer-jax/{task.id}", "keywords": [task.family, task.split]},
        "metadata": {"category": task.family},
        "metadata.composer": {
            "id": task.id,
            "family": task.family,
            "split": task.split,
            "tools": list(task.tools),
            **({} if task.max_turns is None else {"max_turns": task.max_turns}),
            **(_describe_suite(task, task.grader, directory) if isinstance(task.grader, SuiteGrader) else {}),
        },
        "verifier": {"timeout_sec": task.grader.timeout_s + VERIFIER_OVERHEAD_S},
        "agent": {"timeout_sec": AGENT_TIMEOUT_S},
        "environment": {"allow_internet": task.network},
    }
    return "\n".join(_toml_lines(tables))


def _toml_lines(tables: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, values in tables.items():
        if name:
            yield f"[{name}]"
        for key, value in values.items():
            yield f"{key} = {_toml_value(value)}"
        yield ""


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    # JSON and TOML write booleans, finite numbers and strings alike, except that TOML requires DEL to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _suite_dockerfile(task: Task) -> str:
    """Returns a Dockerfile that installs the requirements in the task's metadata, or pytest without any."""
    requirements = task.metadata.get("requirements") or ["pytest"]
    words = " ".join(f"'{requirement}'" for requirement in requirements)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    steps = (f"FROM python:{version}-slim", f"RUN pip install --no-cache-dir {words}", "COPY repo /workspace")
    return "\n".join([*steps, "WORKDIR /workspace", ""])


def _write_suite(task: Task, grader: SuiteGrader, directory: Path) -> dict[str, str]:
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
    files = {"tests/suite.json": json.dumps(suite, indent=1), "environment/Dockerfile": _suite_dockerfile(task)}
    if (gold := task.metadata.get("gold")) is not None:
        files["solution/gold.patch"] = gold_patch(task, gold)
    return {**_shipped(_SUITE_FILES), **protected, **files}


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


def _describe_suite(task: Task, grader: SuiteGrader, directory: Path) -> dict[str, Any]:
    """Returns the entries of [metadata.composer] on the grader and on the packages that the tests need."""
    described = {name: value for name, value in grader.to_json().items() if name != "tests"}
    described["network"] = task.network
    if task.metadata.get("kind"):
        described["kind"] = task.metadata["kind"]
    if task.packages is not None:
        described["packages"] = os.path.relpath(task.packages.resolve(), directory.resolve())
    if task.metadata.get("requirements"):
        described["requirements"] = list(task.metadata["requirements"])
    return described


def _read_suite(described: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Returns the Task fields on repository and grader from the entries that `_describe_suite` wrote.

    Raises UserError when the folder of packages does not exist.
    """
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
        "grader": SuiteGrader.from_json({**described, "tests": directory / "tests" / "repo"}),
        "repository": directory / "environment" / "repo",
        "packages": packages,
        "network": described["network"],
        "files": {},
    }
