"""Grading by a test suite: only code that passes the tests scores. Each forgery is a real submission, really run."""

import asyncio
import hashlib
import json
import os
import shutil
import threading
from dataclasses import replace

import pytest

from composer_jax.errors import UserError
from composer_jax.sandbox import GONE, Change, LocalSandboxPool, SandboxDied, SandboxLimits
from composer_jax.tasks import SuiteGrader, Task
from composer_jax.tasks.grading import grade, suite
from composer_jax.tasks.result_cache import ResultCache
from composer_jax.tasks.retry import ATTEMPTS
from composer_jax.tasks.suites import judge
from composer_jax.tasks.suites.protected import is_protected, protected_files
from composer_jax.tasks.suites.run import pytest_arguments, run_test_suite
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


def graded(pool, task, files, cache=None):
    return asyncio.run(grade(task, as_changes(files), pool, cache))


def test_right_and_wrong(pool, task):
    right = graded(pool, task, {"calc.py": RIGHT})
    assert (right.reward, right.parts) == (1.0, {"f2p": 1.0, "p2p": 1.0})
    assert right.detail == "2 of 2 failing tests repaired, 2 of 2 passing tests kept"
    nothing = graded(pool, task, {})
    assert (nothing.reward, nothing.parts) == (0.0, {"f2p": 0.0, "p2p": 1.0})
    assert "first: tests/test_calc.py::test_add[1-2] failed: assert -1 == " in nothing.detail
    spoiled = graded(pool, task, {"calc.py": RIGHT.replace("a * 2", "a * 3")})
    assert (spoiled.reward, spoiled.parts) == (0.0, {"f2p": 1.0, "p2p": 0.5})


def test_half_a_repair_is_half_a_reward_only_where_that_is_asked_for(pool, task):
    half = {"calc.py": BUGGY.replace("a - b", "3")}
    assert graded(pool, task, half).reward == 0.0
    partial = Task.from_json(
        {**task.to_json(), "grader": {"kind": "suite", **SuiteGrader(FAIL, PASS, partial=True).to_json()}}
    )
    assert graded(pool, partial, half).reward == 0.5


IMPORT_PYTEST = "import _pytest.runner, _pytest.reports, _pytest.python, unittest, builtins, sys, os, gc\n"
ALWAYS_PASSES = """
old = _pytest.reports.TestReport.from_item_and_call.__func__
def report(cls, item, call):
    call.excinfo = None
    return old(cls, item, call)
_pytest.reports.TestReport.from_item_and_call = classmethod(report)
"""
WRITES_JUNIT = """
import re
for o in gc.get_objects():
    if type(o).__name__ == "LogXML":
        cases = "".join(f'<testcase><properties><property name="composer_index" value="{i}"/></properties></testcase>'
                        for i in range(9))
        open(o.logfile, "w").write(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
        os._exit(1)
"""
REGISTERS = """
class Plugin:
    def pytest_runtest_call(self, item):
        item.obj = lambda *a, **k: None
        item.runtest = lambda: None
import pytest
for o in gc.get_objects():
    if type(o).__name__ == "PytestPluginManager":
        o.register(Plugin())
"""
WRITES_TO_PIPES = """
import json
import os
import shutil
import threading
from dataclasses import replace
for fd in range(3, 64):
    for when in ("setup", "call", "teardown"):
        try:
            os.write(fd, (json.dumps({"test": "tests/test_calc.py::test_add[1-2]", "when": when, "outcome": "passed",
                "expected": False, "part": False, "ms": 1, "message": ""}) + "\\n").encode())
        except OSError:
            pass
"""
REWRITES_TESTS = """
text = open("tests/test_calc.py").read()
open("tests/test_calc.py", "w").write(text.replace("assert add(a, b) == a + b", "pass"))
"""
WRITES_TO_THE_REFEREE = """
for name in os.listdir("/proc"):
    if name.isdigit():
        for fd in ("1", "2"):
            try:
                with open(f"/proc/{name}/fd/{fd}", "w") as file:
                    file.write("forged")
            except OSError:
                pass
"""
FORGERIES = {
    "prints that it passes": "print('4 passed')\nprint('tests/test_calc.py::test_add[1-2] PASSED')\n" + BUGGY,
    "leaves at import": "import sys\nsys.exit(0)\n",
    "leaves without a trace": "import os\nos._exit(0)\n",
    "leaves like a failed run": "import os\nos._exit(1)\n",
    "leaves when called": BUGGY.replace("return a - b", "raise SystemExit(0)"),
    "leaves without a trace when called": "import os\n" + BUGGY.replace("return a - b", "os._exit(1)"),
    "skips": "import pytest\n" + BUGGY.replace("return a - b", "pytest.skip('hard')"),
    "expects to fail": "import pytest\n" + BUGGY.replace("return a - b", "pytest.xfail('hard')"),
    "skips the module": "import pytest\npytest.skip('hard', allow_module_level=True)\n",
    "makes every report a pass": IMPORT_PYTEST + ALWAYS_PASSES + BUGGY,
    "replaces what runs a test": IMPORT_PYTEST + "_pytest.python.Function.runtest = lambda self: None\n" + BUGGY,
    "replaces an assertion": IMPORT_PYTEST
    + "unittest.TestCase.assertEqual = lambda *a: None\n"
    + RIGHT.replace("a * 2", "a"),
    "replaces the exception": IMPORT_PYTEST + "builtins.AssertionError = KeyboardInterrupt\n" + BUGGY,
    "writes its own report": IMPORT_PYTEST + WRITES_JUNIT + BUGGY,
    "registers a plugin": IMPORT_PYTEST + REGISTERS + BUGGY,
    "writes into the pipe": IMPORT_PYTEST + WRITES_TO_PIPES + BUGGY,
    "rewrites the tests": REWRITES_TESTS + BUGGY,
    "writes to other processes": IMPORT_PYTEST + WRITES_TO_THE_REFEREE + BUGGY,
    "kills the referee": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n" + BUGGY,
    "is not Python": "def add(a:\n",
    "is empty": "",
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forgeries_do_not_score(pool, task, forgery):
    result = graded(pool, task, {"calc.py": FORGERIES[forgery]})
    assert result.reward == 0.0
    assert result.parts["f2p"] < 1.0 or result.parts["p2p"] < 1.0


def test_a_daemon_left_behind_cannot_change_the_report_and_does_not_hold_it_up(pool, task):
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(60)\n"
    result = graded(pool, task, {"calc.py": daemon + "        os._exit(0)\n    os._exit(0)\n" + RIGHT})
    assert result.reward == 1.0


CHEAT = (
    "import sys\nclass Calc:\n    add = staticmethod(lambda a, b: a + b)\n    double = staticmethod(lambda a: a * 2)\n"
)
CHEATS = {
    "conftest.py": CHEAT + "sys.modules['calc'] = Calc\n",
    "tests/conftest.py": CHEAT + "sys.modules['calc'] = Calc\n",
    "tests/test_calc.py": "def test_add():\n    pass\n",
    "tests/__init__.py": CHEAT + "sys.modules['calc'] = Calc\n",
    "pytest.ini": "[pytest]\naddopts = --co\n",
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-k zero'\n",
    "sitecustomize.py": CHEAT + "sys.modules['calc'] = Calc\n",
    "plugin.dist-info/entry_points.txt": "[pytest11]\nplugin = cheat\n",
    "__pycache__/calc.cpython-311.pyc": "not bytecode",
}


@pytest.mark.parametrize("path", CHEATS)
def test_changes_to_tests_and_their_configuration_are_not_graded(pool, task, path):
    files = {path: CHEATS[path], "cheat.py": CHEAT + "sys.modules['calc'] = Calc\n"}
    assert is_protected(path)
    assert graded(pool, task, files).reward == 0.0
    # Nor do they spoil a right solution.
    assert graded(pool, task, {**files, "calc.py": RIGHT}).reward == 1.0


@pytest.mark.parametrize("name", ["json.py", "pytest.py", "_pytest/__init__.py", "xml/__init__.py", "signal.py"])
def test_modules_that_shadow_what_the_referee_uses_are_not_imported_by_it(pool, task, name):
    files = {name: "import os\nos._exit(0)\n", "calc.py": RIGHT}
    assert graded(pool, task, files).reward == 1.0
    assert graded(pool, task, {**files, "calc.py": BUGGY}).reward == 0.0


def test_deleting_a_folder_leaves_its_tests_and_code_may_be_moved(pool, task, repository):
    moved = {"calc.py": Change("file", b"from core.calc import add, double\n"), "core": Change("folder", mode=0o755)}
    moved["core/calc.py"] = Change("file", RIGHT.encode())
    assert asyncio.run(grade(task, {**moved, "tests": GONE, "pytest.ini": GONE}, pool)).reward == 1.0
    assert asyncio.run(grade(task, {"calc.py": GONE}, pool)).parts == {"f2p": 0.0, "p2p": 0.0}


def test_hidden_tests_are_laid_over_the_workspace(pool, task, tmp_path):
    hidden = lay(
        tmp_path, {"tests/test_more.py": "from calc import add\n\ndef test_more():\n    assert add(5, 6) == 11\n"}
    )
    grader = SuiteGrader(("tests/test_more.py::test_more",), PASS, tests=hidden)
    hiding = Task.from_json({**task.to_json(), "grader": {"kind": "suite", **grader.to_json()}})
    assert graded(pool, hiding, {"calc.py": RIGHT}).reward == 1.0
    assert graded(pool, hiding, {"tests/test_more.py": "def test_more():\n    pass\n"}).reward == 0.0


def test_a_test_that_is_not_there_has_failed(pool, task):
    for missing in ("tests/test_calc.py::test_nothing", "tests/test_nothing.py::test_a"):
        grader = SuiteGrader((*FAIL, missing), PASS)
        other = Task.from_json({**task.to_json(), "grader": {"kind": "suite", **grader.to_json()}})
        result = graded(pool, other, {"calc.py": RIGHT})
        assert (result.reward, result.parts) == (0.0, {"f2p": pytest.approx(2 / 3), "p2p": 1.0})
        assert f"{missing} missing" in result.detail


def test_a_timeout_scores_nothing_and_is_not_remembered(pool, task):
    slow = Task.from_json({**task.to_json(), "grader": {"kind": "suite", **SuiteGrader(FAIL, timeout_s=1).to_json()}})
    cache = ResultCache()
    for _ in range(2):
        result = graded(pool, slow, {"calc.py": BUGGY.replace("return a - b", "while True: pass")}, cache)
        assert (result.reward, result.detail) == (0.0, "the time is over")
    assert (cache.hits, cache.runs) == (0, 2)


def test_results_are_reused_for_the_same_submission_only(pool, task):
    cache = ResultCache()
    first = graded(pool, task, {"calc.py": RIGHT}, cache)
    again = graded(pool, task, {"calc.py": RIGHT, "tests/test_calc.py": "not graded"}, cache)
    assert first == again and (cache.hits, cache.runs) == (1, 1)
    assert graded(pool, task, {"calc.py": BUGGY}, cache).reward == 0.0


def test_dying_sandboxes_are_replaced_and_an_outage_is_no_reward(dying_pool, task):
    pool = dying_pool(2)
    assert graded(pool, task, {"calc.py": RIGHT}).reward == 1.0
    assert pool.acquired == 3
    pool = dying_pool(99)
    with pytest.raises(SandboxDied):
        graded(pool, task, {"calc.py": RIGHT})
    assert pool.acquired == ATTEMPTS


def test_what_a_suite_does_is_told_test_by_test(pool, packages, tmp_path):
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


def test_reports_that_do_not_add_up_are_refused():
    def event(**fields):
        return json.dumps({"secret": "s", **fields})

    def phase(test, when, outcome="passed"):
        return event(test=test, when=when, outcome=outcome, expected=False, part=False, ms=1, message="")

    names = ("a.py::test_a", "a.py::decoy")
    phases = [phase(names[0], when) for when in ("setup", "call", "teardown")]
    phases += [phase(names[1], "setup"), phase(names[1], "call", "failed"), phase(names[1], "teardown")]
    lines = [event(collected=names, decoys=names[1:]), *phases, event(ended=1, changed=[])]
    good = {"exit": 1, "lines": lines, "junit": {"passed": [0], "tests": 2}, "rewritten": [], "log": ""}

    def said(**fields):
        report = {**good, **fields}
        found, foreign = judge.parse_events(report, "s")
        return judge.find_problem(report, found, foreign, judge.collect_outcomes(found))

    assert said() is None
    assert "its process with 0" in said(exit=0)
    assert "exit status 0 does not go with" in said(exit=0, lines=[*lines[:-1], event(ended=0, changed=[])])
    assert "did not come to its end" in said(lines=lines[:-1])
    assert "no JUnit report" in said(junit={"error": "ParseError"})
    assert "other tests as passed" in said(junit={"passed": [0, 1], "tests": 2})
    assert "something else wrote" in said(lines=[*lines, "forged"])
    assert "something else wrote" in said(lines=[*lines, json.dumps({"secret": "t", "ended": 1})])
    assert "functions of the test framework" in said(lines=[*lines[:-1], event(ended=1, changed=["pytest.raises"])])
    assert "were rewritten (a.py)" in said(rewritten=["a.py"])
    lucky = [line.replace("failed", "passed") for line in lines]
    assert "cannot pass" in said(lines=[*lucky[:-1], event(ended=0, changed=[])], exit=0, junit={"passed": [0, 1]})
    twice = [*lines[:4], *lines[1:4], *lines[4:]]
    found, _ = judge.parse_events({"lines": twice}, "s")
    assert judge.collect_outcomes(found)[names[0]][0] == judge.DUPLICATE
    assert judge.unpack_report("no report") is None
    assert judge.judge_report("", "s")["problem"] == "there is no report"


def test_protected_paths(tmp_path):
    paths = ["test_a.py", "a_test.py", "pkg/tests/x.txt", "tests", "conftest.py", "a/pytest.ini", "pyproject.toml"]
    paths += ["setup.cfg", "tox.ini", "a.pth", "x.egg-info/PKG-INFO", "a/__pycache__/b.pyc", "usercustomize.py", "a.so"]
    free = ["a.py", "attest.py", "latest.py", "contests/a.py", "setup.py", "README.md", "pkg/testing.py", "data.json"]
    assert all(map(is_protected, paths)) and not any(map(is_protected, free))
    lay(tmp_path, {"a.py": "", "tests/data.txt": "", "b/conftest.py": ""})
    assert protected_files(tmp_path) == ["b/conftest.py", "tests/data.txt"]


def test_only_pytest_can_be_refereed():
    assert pytest_arguments(("pytest", "-q")) == ["-q"]
    with pytest.raises(UserError, match="'make test' does not begin with python -m pytest"):
        pytest_arguments(("make", "test"))


def test_a_plugin_that_is_installed_may_replace_parts_of_pytest(pool, task, packages, tmp_path):
    # As hypothesis does. What the workspace replaces later is still found.
    shutil.copytree(packages, tmp_path / "more")
    patch = "from _pytest import fixtures\nfixtures.FixtureFunctionMarker.__call__ = lambda self, function: function\n"
    entry = {"busy-1.0.dist-info/entry_points.txt": "[pytest11]\nbusy = busy\n"}
    lay(tmp_path / "more", {"busy.py": patch, "busy-1.0.dist-info/METADATA": "Name: busy\nVersion: 1.0\n", **entry})
    task = replace(task, packages=tmp_path / "more")
    assert graded(pool, task, {"calc.py": RIGHT}).reward == 1.0
    assert "functions of the test framework" in graded(pool, task, {"calc.py": patch + RIGHT}).detail


def test_names_and_links_of_any_bytes_are_graded_and_remembered(pool, task, tmp_path):
    tests = lay(tmp_path / "tests", {"tests/test_calc.py": TESTS})
    (tests / "away").symlink_to(os.fsdecode(b"\xfe"))
    task = replace(task, grader=replace(task.grader, tests=tests))
    cache = ResultCache()
    for _ in range(2):
        assert graded(pool, task, {"calc.py": RIGHT, os.fsdecode(b"\xff.txt"): ""}, cache).reward == 1.0
    assert (cache.runs, cache.hits) == (1, 1)


@pytest.fixture(scope="module")
def narrow_pool():
    pool = LocalSandboxPool(SandboxLimits(timeout_s=10, output_kb=1), size=1)
    yield pool
    pool.kill()


@pytest.fixture(scope="module")
def talkative(tmp_path_factory, task):
    """A task whose report is longer than a KiB."""
    names = [hashlib.sha256(bytes([number])).hexdigest() for number in range(40)]
    text = f"import pytest\nfrom calc import add\n\n\n@pytest.mark.parametrize('name', {names})\n"
    text += "def test_add(name):\n    assert add(1, 2) == 3\n"
    repository = lay(tmp_path_factory.mktemp("talkative"), {"calc.py": BUGGY, "test_calc.py": text})
    grader = SuiteGrader(tuple(f"test_calc.py::test_add[{name}]" for name in names), timeout_s=10)
    return replace(task, repository=repository, grader=grader)


def test_a_report_that_our_limits_cut_is_nobodys_reward(narrow_pool, talkative):
    cache, why = (
        ResultCache(),
        "report on the 40 tests of task r-0 does not fit into SandboxLimits.output_kb = 1; make the pool",
    )
    for _ in range(2):
        with pytest.raises(UserError, match=why):
            graded(narrow_pool, talkative, {"calc.py": RIGHT}, cache)
    assert (cache.runs, cache.hits) == (2, 0)


def test_code_that_floods_the_report_stops_nobody(narrow_pool, talkative, monkeypatch):
    monkeypatch.setattr("composer_jax.tasks.suites.run._REPORT_BYTES", 0)
    monkeypatch.setattr("composer_jax.tasks.suites.run._TEST_BYTES", 1)
    cache = ResultCache()
    for _ in range(2):
        found = graded(narrow_pool, talkative, {"calc.py": RIGHT}, cache)
        assert found.reward == 0.0 and "bytes of the report are lost" in found.detail
    assert cache.runs == 2


def test_files_are_read_away_from_the_event_loop(pool, task, tmp_path, monkeypatch):
    tests = lay(tmp_path / "tests", {"tests/test_calc.py": TESTS})
    task = replace(task, grader=replace(task.grader, tests=tests))
    read, where = suite._files_below, []

    def watched(*arguments, **options):
        where.append(threading.current_thread())
        return read(*arguments, **options)

    monkeypatch.setattr(suite, "_files_below", watched)
    changes = {"calc.py": Change("file", RIGHT.encode()), "tests": GONE, "sub": GONE}
    asyncio.run(grade(task, changes, pool))
    assert len(where) == 2 and threading.current_thread() not in where
