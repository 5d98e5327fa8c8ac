"""Running a suite in a sandbox: the outcome of every test, and which commands are accepted."""

import asyncio

import pytest

from composer_jax.errors import UserError
from composer_jax.tasks import SuiteGrader
from composer_jax.tasks.suites import judge
from composer_jax.tasks.suites.run import pytest_arguments, run_test_suite
from tests.tasks.conftest import lay


def test_a_report_holds_the_outcome_of_every_test(pool, packages, tmp_path):
    text = """
import pytest
@pytest.fixture
def broken():
    raise OSError("no disk")
def test_setup(broken): pass
def test_skip(): pytest.skip("not today")
@pytest.mark.xfail
def test_expected(): assert 0
@pytest.mark.xfail
def test_lucky(): pass
def test_prints(capsys): print("x" * 100)
def test_subtests(subtests):
    for i in range(3):
        with subtests.test(i=i):
            assert i != 1
"""
    repository = lay(tmp_path, {"test_all.py": text, "test_broken.py": "import nothing_like_that\n"})
    report = asyncio.run(run_test_suite(pool, repository, packages, SuiteGrader(("a",)).command, timeout_s=10))
    assert report.problem is None
    assert {test.partition("::")[2]: result.outcome for test, result in report.tests.items()} == {
        "test_setup": "error",
        "test_skip": "skipped",
        "test_expected": "skipped",
        "test_lucky": judge.XPASSED,
        "test_prints": "passed",
        "test_subtests": "failed",
    }
    assert report.tests["test_all.py::test_setup"].message.startswith("OSError: no disk")
    assert "No module named 'nothing_like_that'" in report.uncollected["test_broken.py"]


def test_only_commands_of_pytest_are_accepted():
    assert pytest_arguments(("pytest", "-q")) == ["-q"]
    with pytest.raises(UserError, match="'make test' does not begin with python -m pytest"):
        pytest_arguments(("make", "test"))
