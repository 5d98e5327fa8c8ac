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

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from composer_jax.errors import UserError
from composer_jax.tasks.grader import CaseGrader, SuiteGrader
from composer_jax.tasks.harbor import suite
from composer_jax.tasks.task import Task

SCHEMA_VERSION = "1.0"
AGENT_TIMEOUT_S = 600.0
VERIFIER_OVERHEAD_S = 60.0  # to start a container and an interpreter, in addition to the grader's timeout
_HERE = Path(__file__).parent
_GRADING = _HERE.parent / "grading"
_DOCKERFILE = "FROM python:3.11-slim\nCOPY repo /workspace\nWORKDIR /workspace\n"
_TEST_SH = "#!/bin/sh\nexec python3 /tests/verify.py /tests /workspace /logs/verifier\n"
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
        files |= suite.write_suite(task, task.grader, directory)
    else:
        files |= _write_cases(task)
    files |= {
        "task.toml": _task_toml(task, directory),
        "instruction.md": task.instruction,
        "environment/Dockerfile": suite.dockerfile(task) if isinstance(task.grader, SuiteGrader) else _DOCKERFILE,
        "solution/solve.sh": _SOLVE_SH,
        "solution/solve.py": (_HERE / "solve.py").read_text(encoding="utf-8"),
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
        rest = suite.read_suite(manifest, directory) if is_suite else _read_cases(directory)
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


def _write_cases(task: Task) -> dict[str, str]:
    return {
        "tests/test.sh": _TEST_SH,
        "tests/verify.py": (_HERE / "verify_cases.py").read_text(encoding="utf-8"),
        "tests/judge.py": (_GRADING / "judge_cases.py").read_text(encoding="utf-8"),
        "tests/call_cases.py": (_GRADING / "call_cases.py").read_text(encoding="utf-8"),
        "tests/cases.json": json.dumps(task.grader.to_json(), indent=1),
    }


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
            **(suite.describe_suite(task, task.grader, directory) if isinstance(task.grader, SuiteGrader) else {}),
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
