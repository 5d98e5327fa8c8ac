"""Forged submissions to a test suite: only code that passes the tests scores. Each one really runs."""

import pytest

from composer_jax.tasks.suites.protected import is_protected
from tests.tasks.grading.conftest import BUGGY, FAIL, RIGHT, grade_files

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
WRITES_TO_PIPES = f"""
import itertools
import json
import os
import shutil
import threading
from dataclasses import replace
for fd, test in itertools.product(range(3, 64), {FAIL}):
    for when in ("setup", "call", "teardown"):
        try:
            os.write(fd, (json.dumps({{"test": test, "when": when, "outcome": "passed",
                "expected": False, "part": False, "ms": 1, "message": ""}}) + "\\n").encode())
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
NAMES_A_TEST_FILE = """
import os
import pytest
code = "def give_up():\\n    import pytest\\n    pytest.xfail('hard')\\n"
exec(compile(code, os.path.abspath("tests/test_calc.py"), "exec"))
"""
ADDS_MARKS = """
import gc
import _pytest.python
import pytest
def add_marks(mark, *names):
    for o in gc.get_objects():
        if isinstance(o, _pytest.python.Function) and o.name.startswith(names):
            o.add_marker(mark)
"""
FORGERIES = {
    "prints that it passes": f"print('4 passed', *{FAIL}, 'PASSED', sep='\\n')\n" + BUGGY,
    "leaves at import": "import sys\nsys.exit(0)\n",
    "leaves without a trace": "import os\nos._exit(0)\n",
    "leaves like a failed run": "import os\nos._exit(1)\n",
    "leaves when called": BUGGY.replace("return a - b", "raise SystemExit(0)"),
    "leaves without a trace when called": "import os\n" + BUGGY.replace("return a - b", "os._exit(1)"),
    "skips": "import pytest\n" + BUGGY.replace("return a - b", "pytest.skip('hard')"),
    "expects to fail": "import pytest\n" + BUGGY.replace("return a - b", "pytest.xfail('hard')"),
    "skips what must go on passing": "import pytest\n" + RIGHT.replace("return a * 2", "pytest.skip('hard')"),
    "raises unittest's skip": "import unittest\n" + RIGHT.replace("return a * 2", "raise unittest.SkipTest"),
    "fails as expected": "import pytest\n" + BUGGY.replace("return a - b", "raise pytest.xfail.Exception('hard')"),
    "fails as expected in the name of a test file": NAMES_A_TEST_FILE + BUGGY.replace("return a - b", "give_up()"),
    "marks what fails": ADDS_MARKS + BUGGY.replace("return a - b", "add_marks(pytest.mark.xfail, 'test_add[')"),
    "marks what it breaks": ADDS_MARKS
    + RIGHT.replace("return a + b", "add_marks(pytest.mark.skip, 'test_double', 'test_zero'); return a + b").replace(
        "return a * 2", "return a"
    ),
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
    result = grade_files(pool, task, {"calc.py": FORGERIES[forgery]})
    assert result.reward == 0.0
    assert result.parts["f2p"] < 1.0 or result.parts["p2p"] < 1.0


def test_a_daemon_neither_changes_nor_delays_the_report(pool, task):
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(60)\n"
    result = grade_files(pool, task, {"calc.py": daemon + "        os._exit(0)\n    os._exit(0)\n" + RIGHT})
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
    assert grade_files(pool, task, files).reward == 0.0


def test_changes_that_are_not_graded_do_not_spoil_a_right_solution(pool, task):
    assert grade_files(pool, task, {**CHEATS, "calc.py": RIGHT}).reward == 1.0


def test_the_referee_does_not_import_modules_that_shadow_its_own(pool, task):
    names = ("json.py", "pytest.py", "_pytest/__init__.py", "xml/__init__.py", "signal.py")
    files = dict.fromkeys(names, "import os\nos._exit(0)\n")
    assert grade_files(pool, task, {**files, "calc.py": RIGHT}).reward == 1.0
    assert grade_files(pool, task, {**files, "calc.py": BUGGY}).reward == 0.0
