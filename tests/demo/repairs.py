"""Workspaces of the bug-fixing families after edits, and which cases pass in them."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from composer_jax.tasks.grading.judge_cases import same_value
from composer_jax.tasks.task import Task


def repaired(task: Task, lines: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the workspace in which every broken function has a statement of `lines`, by default the right one.

    lines: name of a broken function -> its statement.
    """
    files = dict(task.files)
    for bug in task.metadata["bugs"]:
        text = files[bug["path"]]
        assert text.count(bug["old"]) == 1
        files[bug["path"]] = text.replace(bug["old"], (lines or {}).get(bug["function"], bug["new"]))
    return files


def states(task: Task) -> Iterator[dict[str, str]]:
    """Yields every choice of one statement of its kind for every broken function, as `lines` of `repaired`."""
    bugs = task.metadata["bugs"]
    for lines in itertools.product(*([bug["new"], bug["old"], *bug["wrong"]] for bug in bugs)):
        yield {bug["function"]: line for bug, line in zip(bugs, lines, strict=True)}


def right_lines(task: Task) -> dict[str, str]:
    """Returns the state in which nothing is broken."""
    return {bug["function"]: bug["new"] for bug in task.metadata["bugs"]}


def visible(task: Task) -> list[tuple[Any, ...]]:
    """Returns the cases (module, function, arguments, value) that the agent can run."""
    return [tuple(case) for case in json.loads(task.files["cases.json"])]


def hidden(task: Task) -> list[tuple[Any, ...]]:
    """Returns the cases of the grader."""
    return [(*case.call, case.want) for case in task.grader.cases]


def passes(files: Mapping[str, str], cases: Sequence[tuple[Any, ...]]) -> list[bool]:
    """Returns which cases pass, evaluated here: the modules are our own one-liners."""
    scopes: dict[str, dict[str, Any]] = {}
    for module in {case[0] for case in cases}:
        exec(files[f"{module}.py"], scopes.setdefault(module, {}))
    return [same_value(scopes[module][function](*args), want) for module, function, args, want in cases]


def failing(files: Mapping[str, str], cases: Sequence[tuple[Any, ...]]) -> set[str]:
    """Returns the names of the functions with a case that does not pass."""
    return {case[1] for case, ok in zip(cases, passes(files, cases), strict=True) if not ok}
