"""Running a suite in a sandbox: the outcome of every test, and which commands are accepted."""

import asyncio

import pytest

from composer_jax.errors import UserError
from composer_jax.tasks import SuiteGrader
from composer_jax.tasks.suites import judge
from composer_jax.tasks.suites.run import pytest_arguments, run_test_suite
from tests.tasks.conftest import NEEDED, copy_installed, lay


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


MOCKS = """
import pytest, unittest, unittest.mock
add = unittest.mock.MagicMock(side_effect=pytest.xfail.Exception("no"))
sub = unittest.mock.MagicMock(side_effect=unittest.SkipTest("no"))
"""
OF_MOCKS = """
import unittest
from shop import add, sub
def test_add(): assert add(1, 2) == 3
class TestSub(unittest.TestCase):
    def test_parts(self):
        for i in range(2):
            with self.subTest(i=i):
                self.assertEqual(sub(i), 5)
    def test_whole(self):
        self.assertEqual(sub(1), 5)
"""
HELPERS = """
import pytest
known_bug = pytest.mark.xfail(reason="known")
requires_numpy = pytest.mark.skipif(True, reason="no numpy")
def need_network(): pytest.skip("no network")
@pytest.mark.xfail
class Base: pass
def helps(): pass
"""
OF_HELPERS = """
from tests import helpers
from tests.helpers import known_bug as bug, requires_numpy, Base
@bug
def test_bug(): assert 0
@requires_numpy
def test_numpy(): pass
def test_network(): helpers.need_network()
class TestBase(Base):
    def test_base(self): assert 0
"""


def test_marks_come_from_the_files_of_tests_and_not_from_objects_of_the_code(pool, packages, tmp_path):
    """A test's own frame is in the trace of every exception, so the trace alone does not tell who raises it."""
    files = {"shop.py": MOCKS, "tests/test_mocks.py": OF_MOCKS, "tests/helpers.py": HELPERS}
    files |= {"tests/__init__.py": "", "tests/test_helpers.py": OF_HELPERS}
    repository = lay(tmp_path, files)
    mocked = [f"tests/test_mocks.py::{name}" for name in ("test_add", "TestSub::test_parts", "TestSub::test_whole")]
    names = ("test_bug", "test_numpy", "test_network", "TestBase::test_base")
    helped = [f"tests/test_helpers.py::{name}" for name in names]
    command = SuiteGrader(("a",)).command
    run = run_test_suite(pool, repository, packages, command, timeout_s=10, tests=[*mocked, *helped])
    report = asyncio.run(run)
    assert report.problem is None, report.log
    assert [report.tests[test].outcome for test in mocked] == [judge.ENDED_BY_CODE] * 3
    outcomes = [judge.XFAILED, judge.SKIPPED, judge.SKIPPED, judge.XFAILED]
    assert [report.tests[test].outcome for test in helped] == outcomes


def test_only_commands_of_pytest_are_accepted():
    assert pytest_arguments(("pytest", "-q")) == ["-q"]
    with pytest.raises(UserError, match="'make test' does not begin with python -m pytest"):
        pytest_arguments(("make", "test"))


LOW_COVERAGE = """
import pytest
def pytest_addoption(parser):
    parser.addoption("--cov-fail-under", type=int)
    parser.addoption("--no-cov", action="store_true")
@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    options = early_config.known_args_namespace
    early_config.fails = options.cov_fail_under and not options.no_cov
def pytest_sessionfinish(session):
    session.exitstatus = 1 if session.config.fails else session.exitstatus
"""


@pytest.fixture(scope="module")
def plugins(packages, tmp_path_factory):
    """The packages with pytest-xdist, and a plugin that fails as pytest-cov does."""
    folder = tmp_path_factory.mktemp("plugins")
    copy_installed((*NEEDED, "pytest-xdist", "execnet", "hypothesis", "sortedcontainers"), folder)
    entry_points = "[pytest11]\nlow_coverage = low_coverage\n"
    metadata = {"METADATA": "Name: low_coverage\nVersion: 1\n", "entry_points.txt": entry_points}
    lay(folder / "low_coverage-1.dist-info", metadata)
    return lay(folder, {"low_coverage.py": LOW_COVERAGE})


@pytest.mark.parametrize(
    "addopts",
    [
        "-n 2 -m 'not slow'",
        "-d --tx 2*popen --ff --cov-fail-under=100",
        "--sw --lf -x -p no:cacheprovider -k 'not slow'",
    ],
)
def test_addopts_do_not_change_what_the_report_holds(pool, plugins, tmp_path, addopts):
    text = """
import pytest
def test_first(): assert 0
@pytest.mark.slow
def test_slow(): pass
def test_last(): pass
"""
    ini = f"[pytest]\naddopts = {addopts}\nmarkers = slow\nfilterwarnings = error\n"
    repository = lay(tmp_path, {"test_all.py": text, "pytest.ini": ini})
    report = asyncio.run(run_test_suite(pool, repository, plugins, SuiteGrader(("a",)).command, timeout_s=10))
    assert report.problem is None, report.log
    outcomes = {test.partition("::")[2]: result.outcome for test, result in report.tests.items()}
    assert {"test_slow": "passed"} | outcomes == {"test_first": "failed", "test_slow": "passed", "test_last": "passed"}
    assert ("test_slow" in outcomes) == ("not slow" not in addopts)


def test_hypothesis_draws_the_same_examples_in_every_run_and_may_be_slow(pool, plugins, tmp_path):
    text = """
import time
from hypothesis import given, settings, strategies as st
DRAWN = []
@settings(max_examples=2)
@given(st.booleans())
def test_slow(x): time.sleep(0.3)
@given(st.integers(0, 10**9))
def test_drawn(x): DRAWN.append(x)
def test_message(): raise ValueError(DRAWN[-9:])
"""
    repository = lay(tmp_path, {"test_all.py": text})

    async def messages():
        command = SuiteGrader(("a",)).command
        runs = [run_test_suite(pool, repository, plugins, command, timeout_s=20) for _ in range(2)]
        return [{name: test.message for name, test in report.tests.items()} for report in await asyncio.gather(*runs)]

    first, second = asyncio.run(messages())
    assert first["test_all.py::test_message"].startswith("ValueError: [") and first == second
    assert first["test_all.py::test_slow"] == ""
