"""Grades forged solutions of a repository's tasks, none of which may score: `python -m benchmarks.cheats TASKS`.

TASKS is a folder of tasks with a suite (`launch.tasks generate`). The forgeries are those of
tests/tasks/grading/test_suite_forgeries.py, with the broken file of a task in place of their own, and the ones below;
the tasks take turns. Before them every task is graded with its own solution, which must score 1. Prints each forgery
that scored, and as the last line one JSON object:
    tasks, solved     tasks, and how many of their own solutions scored 1
    attempts          forged solutions
    rewarded          the forgeries whose reward was above 0
"""

import argparse
import ast
import asyncio
import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path

from composer_jax.sandbox import LocalSandboxPool
from composer_jax.tasks.formats import read_tasks
from composer_jax.tasks.grading import changes_from_texts, grade
from composer_jax.tasks.suites.run import SUITE_LIMITS
from composer_jax.tasks.task import Task
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


def forge(task: Task) -> dict[str, Files]:
    """The forgeries of a task: name -> the files that they change."""
    path = next(path for path in task.metadata["gold"] if path.endswith(".py"))
    assert task.repository is not None
    broken = (task.repository / path).read_text() if (task.repository / path).is_file() else ""
    forged: dict[str, Files] = {name: {path: _adapt(text, broken)} for name, text in FORGERIES.items()}
    forged |= {name: {path: code + broken} for name, code in AT_IMPORT.items()}
    for cheat, text in CHEATS.items():
        content = IMPORT_PYTEST + ALWAYS_PASSES if "Calc" in text else text
        forged[f"writes {cheat}"] = {cheat: content, "cheat.py": IMPORT_PYTEST + ALWAYS_PASSES}
    return forged


def _adapt(forgery: str, broken: str) -> str:
    """A forgery of calc.py for another module: what it runs at import, and what its function does when called."""
    head, found, rest = forgery.partition("def add(a, b):\n")
    body = rest.partition("\n")[0].strip()
    if not found:
        return head
    return head + (broken if body in ("return a - b", "return a + b") else _in_every_function(broken, body))


def _in_every_function(source: str, statement: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body[:0] = ast.parse(statement).body
    return ast.unparse(tree)


async def measure(tasks: list[Task], jobs: int) -> dict[str, object]:
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
    print(json.dumps(asyncio.run(measure(list(read_tasks(arguments.tasks)), len(os.sched_getaffinity(0))))))


if __name__ == "__main__":
    main()
