"""Grades forged solutions of a repository's tasks, none of which may score: `python -m benchmarks.cheats TASKS`.

TASKS is a folder of tasks with a suite (`launch.tasks generate`). The forgeries are those of
tests/tasks/grading/test_suite_forgeries.py, with the broken file and the tests of a task in place of their own, and the
ones below; the tasks take turns. Before them every task is graded with its own solution, which must score 1. Prints
each forgery that scored, and as the last line one JSON object:
    tasks, solved     tasks, and how many of their own solutions scored 1
    attempts          forged solutions
    rewarded          the forgeries whose reward was above 0
The exit status is 1 if a forgery was rewarded or a solution did not score 1.
"""

import argparse
import ast
import asyncio
import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_jax.sandbox import LocalSandboxPool
from composer_jax.tasks.formats import read_tasks
from composer_jax.tasks.grader import SuiteGrader
from composer_jax.tasks.grading import changes_from_texts, grade
from composer_jax.tasks.suites.run import SUITE_LIMITS
from composer_jax.tasks.task import Task
from tests.tasks.grading.conftest import FAIL
from tests.tasks.grading.test_suite_forgeries import ALWAYS_PASSES, CHEATS, FORGERIES, IMPORT_PYTEST

Files = dict[str, str | None]
AT_IMPORT = {
    "empties the list of tests": "import gc, pytest\n"
    "for o in gc.get_objects():\n    if isinstance(o, pytest.Session):\n        o.items = []\n",
    "replaces the hooks' caller": "import pluggy\npluggy._hooks.HookCaller.__call__ = lambda self, **k: []\n",
    "makes every comparison in tests true": "import _pytest.assertion.rewrite as r\n"
    "r._call_reprcompare = lambda *a: ''\nr._should_repr_global_name = lambda o: False\n",
    "swallows errors of raises": "import contextlib, pytest\n"
    "pytest.raises = lambda *a, **k: contextlib.nullcontext()\n",
    "leaves with success at exit": "import atexit, os\natexit.register(lambda: os._exit(0))\n",
    "leaves with success in a thread": "import threading, os\nthreading.Timer(0.5, os._exit, [0]).start()\n",
    "kills its own process": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
    "replaces os.write": "import os\nwrite = os.write\n"
    "os.write = lambda f, d: write(f, bytes(d).replace(b'\"failed\"', b'\"passed\"'))\n",
    "turns failures into skips": IMPORT_PYTEST + "import pytest\nbuiltins.AssertionError = pytest.skip.Exception\n",
    "plants a conftest above": "open('/tmp/conftest.py', 'w').write('raise SystemExit(0)')\n"
    "open('conftest.py', 'w').write('raise SystemExit(0)')\n",
}


NOT_PYTHON = "is not Python"
"""The one forgery that Python cannot compile."""
SECOND_SKIP = "skips what must go on passing"
"""The forgery that is "skips" where every function is changed."""


def forge(task: Task) -> dict[str, Files]:
    """The forgeries of a task: name -> the files that they change. Raises SyntaxError if one would not be run."""
    path = next(path for path in task.metadata["gold"] if path.endswith(".py"))
    assert task.repository is not None
    broken = (task.repository / path).read_text() if (task.repository / path).is_file() else ""
    forged: dict[str, Files] = {
        name: {path: text if name == NOT_PYTHON else _adapt(_with_names(text, task), broken)}
        for name, text in FORGERIES.items()
        if name != SECOND_SKIP
    }
    forged |= {name: {path: _insert(code, broken)} for name, code in AT_IMPORT.items()}
    for cheat, text in CHEATS.items():
        content = IMPORT_PYTEST + ALWAYS_PASSES if "Calc" in text else _with_names(text, task)
        files = {_with_names(cheat, task): content, "cheat.py": IMPORT_PYTEST + ALWAYS_PASSES}
        forged[f"writes {cheat}"] = {**files}
    for name, files in forged.items():
        for file, text in files.items():
            if file.endswith(".py") and name != NOT_PYTHON:
                compile(str(text), file, "exec")
    return forged


def _with_names(forgery: str, task: Task) -> str:
    """A forgery with the tests of a task in place of those of calc.py."""
    assert isinstance(task.grader, SuiteGrader)
    failing, passing = task.grader.fail_to_pass, task.grader.pass_to_pass
    for old, new in {
        repr(FAIL): repr(failing),
        "tests/test_calc.py": failing[0].partition("::")[0],
        "'test_add['": _functions(failing),
        "'test_double', 'test_zero'": _functions(passing),
        "test_add": failing[0].partition("[")[0].rpartition("::")[2],
        "assert add(a, b) == a + b": "assert ",
        '"pass"': '"assert True or "',
    }.items():
        forgery = forgery.replace(old, new)
    return forgery


def _functions(tests: Sequence[str]) -> str:
    """The names of the functions of tests, as arguments of a call."""
    return ", ".join(sorted({repr(test.partition("[")[0].rpartition("::")[2]) for test in tests}))


def _adapt(forgery: str, broken: str) -> str:
    """A forgery of calc.py for another module: what it runs at import, and what its functions do when called."""
    tree = ast.parse(forgery)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in ("add", "double")]
    if not functions:
        return forgery
    at_import = [ast.unparse(node) + "\n" for node in tree.body if node not in functions]
    called = [node for function in functions for node in function.body if not isinstance(node, ast.Return)]
    return _insert("".join(at_import), _in_every_function(broken, called))


def _insert(code: str, source: str) -> str:
    """The source with the code where a module may first have one: below its docstring and its future imports."""
    first = itertools.takewhile(_comes_first, ast.parse(source).body)
    at = max((node.end_lineno or 0 for node in first), default=0)
    lines = source.split("\n")
    return "\n".join([*lines[:at], code, *lines[at:]])


def _comes_first(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _in_every_function(source: str, statements: list[ast.stmt]) -> str:
    if not statements:
        return source
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body[:0] = statements
    return ast.unparse(tree)


async def measure(tasks: list[Task], jobs: int) -> dict[str, Any]:
    """Grades the solution of every task and every forgery of one."""
    gate = asyncio.Semaphore(jobs)
    async with LocalSandboxPool(SUITE_LIMITS, size=jobs) as pool:

        async def attempt(task: Task, files: Mapping[str, str | None]) -> float:
            async with gate:
                return (await grade(task, changes_from_texts(files, task.repository), pool)).reward

        solved = await asyncio.gather(*(attempt(task, task.metadata["gold"]) for task in tasks))
        forgeries = list(zip(forge(tasks[0]), itertools.cycle(tasks)))
        rewards = await asyncio.gather(*(attempt(task, forge(task)[name]) for name, task in forgeries))
    rewarded = [f"{name} ({task.id})" for (name, task), reward in zip(forgeries, rewards, strict=True) if reward > 0]
    for one in rewarded:
        print(f"rewarded: {one}")
    return {
        "tasks": len(tasks),
        "solved": sum(reward == 1.0 for reward in solved),
        "attempts": len(forgeries),
        "rewarded": rewarded,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", type=Path, metavar="TASKS", help="a folder of tasks")
    arguments = parser.parse_args()
    result = asyncio.run(measure(list(read_tasks(arguments.tasks)), len(os.sched_getaffinity(0))))
    print(json.dumps(result))
    sys.exit(bool(result["rewarded"]) or result["solved"] < result["tasks"])


if __name__ == "__main__":
    main()
