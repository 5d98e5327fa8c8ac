"""The files that every generated workspace has in common, and how its modules are laid out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from composer_jax.tasks.functions import Function
from composer_jax.tasks.grader import Case

RUN_TESTS = Path(__file__).with_name("run_tests.py").read_text(encoding="utf-8")
"""The runner that the agent's run_tests tool starts. Real files, so that they are linted and tested like any
other."""


def visible_cases(cases: Sequence[Case]) -> str:
    """The text of cases.json: what run_tests.py checks. It is not a Python file, so grep does not find it."""
    return json.dumps([[*case.call, case.want] for case in cases])


def module_text(contents: Sequence[Function], mistakes: Mapping[str, str]) -> str:
    """A module of these functions; `mistakes` maps a function's name to the wrong expression it returns."""
    return "\n".join(function.source(mistakes.get(function.name)) for function in contents)


def is_protected(path: str) -> bool:
    """Whether `path` belongs to the tests: changes to it are never graded. Only .py files count as a
    submission."""
    *folders, name = path.split("/")
    stem = name.removesuffix(".py")
    return (
        not name.endswith(".py")
        or stem in ("run_tests", "call_cases", "conftest", "sitecustomize", "usercustomize")
        or stem.startswith("test_")
        or stem.endswith("_test")
        or "tests" in folders
    )
