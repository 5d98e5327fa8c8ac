"""A small repository with a bug and the task to repair it, graded by its test suite."""

import asyncio

import pytest

from composer_jax.tasks import SuiteGrader, Task
from composer_jax.tasks.grading import grade
from tests.tasks.conftest import as_changes, lay

BUGGY = "def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return a * 2\n"
RIGHT = BUGGY.replace("a - b", "a + b")
TESTS = """
import pytest, unittest
from calc import add, double

@pytest.mark.parametrize("a, b", [(1, 2), (3, 4)])
def test_add(a, b):
    assert add(a, b) == a + b

class TestDouble(unittest.TestCase):
    def test_double(self):
        self.assertEqual(double(4), 8)

def test_zero():
    assert double(0) == 0
"""
FAIL = ("tests/test_calc.py::test_add[1-2]", "tests/test_calc.py::test_add[3-4]")
PASS = ("tests/test_calc.py::TestDouble::test_double", "tests/test_calc.py::test_zero")


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    files = {"calc.py": BUGGY, "tests/test_calc.py": TESTS, "pytest.ini": "[pytest]\n"}
    return lay(tmp_path_factory.mktemp("repository"), files)


@pytest.fixture(scope="module")
def task(repository, packages):
    return Task(
        id="r-0",
        family="repository",
        split="train",
        instruction="Repair it.",
        files={},
        tools=("finish",),
        grader=SuiteGrader(FAIL, PASS, timeout_s=10),
        repository=repository,
        packages=packages,
    )


def grade_files(pool, task, files, cache=None):
    return asyncio.run(grade(task, as_changes(files), pool, cache and cache.of_episode(task.id, 0)))
