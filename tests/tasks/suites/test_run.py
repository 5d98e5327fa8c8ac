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
        "test_expected": judge.XFAILED,
        "test_lucky": judge.XPASSED,
        "test_prints": "passed",
        "test_subtests": "failed",
    }
    assert report.tests["test_all.py::test_setup"].message.startswith("OSError: no disk")
    assert "No module named 'nothing_like_that'" in report.uncollected["test_broken.py"]


SHOP = """
import pytest, unittest

def skip(): pytest.skip("no numpy")
def xfail(): pytest.xfail("known")
def raise_skip_test(): raise unittest.SkipTest("no numpy")
def ask_unittest(): unittest.TestCase().skipTest("no numpy")
"""
SKIPS = """
import unittest
import pytest
import shop
from tests.helper import need_numpy

@pytest.mark.skip
def test_marked(): pass
def test_helper(): need_numpy()
def test_fixture(numpy): pass
def test_xfail(): pytest.xfail("known")
def test_code_skips(): shop.skip()
def test_code_xfails(): shop.xfail()
def test_code_raises(): shop.raise_skip_test()
def test_code_asks(): shop.ask_unittest()
@pytest.mark.xfail
def test_expected(): shop.no_such_name
@pytest.mark.xfail
def test_code_skips_expected(): shop.skip()
def test_subtests(subtests):
    for i in range(3):
        with subtests.test(i=i):
            if i == 1: pytest.skip("odd")
def test_subtests_of_code(subtests):
    with subtests.test():
        shop.skip()

@unittest.skip("all of them")
class TestAll(unittest.TestCase):
    def test_all(self): pass

class TestUnit(unittest.TestCase):
    @unittest.skip("not today")
    def test_decorated(self): pass
    def test_skip(self): self.skipTest("not today")
    @unittest.expectedFailure
    def test_expected(self): self.fail()
    def test_sub(self):
        for i in range(4):
            with self.subTest(i=i):
                if i % 2: self.skipTest("odd")
    def test_sub_of_code(self):
        with self.subTest():
            shop.raise_skip_test()
    def test_code_raises(self): shop.raise_skip_test()
"""


def test_skips_and_expected_failures_count_as_such_if_the_tests_declare_them(pool, packages, tmp_path):
    helper = "import pytest\n\ndef need_numpy(): pytest.importorskip('numpy_2000')\n"
    fixture = "import pytest\n\n@pytest.fixture\ndef numpy(): pytest.skip('no numpy')\n"
    files = {"shop.py": SHOP, "tests/test_skips.py": SKIPS, "tests/helper.py": helper, "tests/conftest.py": fixture}
    repository = lay(tmp_path, files)

    def run(tests=None):
        command = SuiteGrader(("a",)).command
        return asyncio.run(run_test_suite(pool, repository, packages, command, timeout_s=10, tests=tests))

    report = run()
    assert report.problem is None, report.log
    by_code = judge.ENDED_BY_CODE
    assert {test.partition("::")[2]: result.outcome for test, result in report.tests.items()} == {
        "test_marked": judge.SKIPPED,
        "test_helper": judge.SKIPPED,
        "test_fixture": judge.SKIPPED,
        "test_xfail": judge.XFAILED,
        "test_code_skips": by_code,
        "test_code_xfails": by_code,
        "test_code_raises": by_code,
        "test_code_asks": by_code,
        "test_expected": judge.XFAILED,
        "test_code_skips_expected": by_code,
        "test_subtests": judge.PASSED,
        "test_subtests_of_code": by_code,
        "TestAll::test_all": judge.SKIPPED,
        "TestUnit::test_decorated": judge.SKIPPED,
        "TestUnit::test_skip": judge.SKIPPED,
        "TestUnit::test_expected": judge.XFAILED,
        "TestUnit::test_sub": judge.PASSED,
        "TestUnit::test_sub_of_code": by_code,
        "TestUnit::test_code_raises": by_code,
    }
    by_id = run(list(report.tests))  # of these the marks that their files mention are known as well
    assert {test: result.outcome for test, result in by_id.tests.items()} == {
        test: result.outcome for test, result in report.tests.items()
    }
    assert "shop.py raised the exception" in report.tests["tests/test_skips.py::test_code_skips"].message


def test_only_commands_of_pytest_are_accepted():
    assert pytest_arguments(("pytest", "-q")) == ["-q"]
    with pytest.raises(UserError, match="'make test' does not begin with python -m pytest"):
        pytest_arguments(("make", "test"))
