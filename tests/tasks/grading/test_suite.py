"""Grading by a test suite: what is graded, what is restored, what is cached, and what gives no reward."""

import asyncio
import hashlib
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from composer_jax.errors import UserError
from composer_jax.sandbox import GONE, Change, LocalSandboxPool, SandboxLimits
from composer_jax.tasks import SuiteGrader, Task
from composer_jax.tasks.grading import grade
from composer_jax.tasks.result_cache import ResultCache
from tests.tasks.conftest import lay
from tests.tasks.grading.conftest import BUGGY, FAIL, PASS, RIGHT, TESTS, grade_files


def test_right_and_wrong(pool, task):
    right = grade_files(pool, task, {"calc.py": RIGHT})
    assert (right.reward, right.parts) == (1.0, {"f2p": 1.0, "p2p": 1.0})
    assert right.detail == "2 of 2 failing tests repaired, 2 of 2 passing tests kept"
    nothing = grade_files(pool, task, {})
    assert (nothing.reward, nothing.parts) == (0.0, {"f2p": 0.0, "p2p": 1.0})
    assert "first: tests/test_calc.py::test_add[1-2] failed: assert -1 == " in nothing.detail
    spoiled = grade_files(pool, task, {"calc.py": RIGHT.replace("a * 2", "a * 3")})
    assert (spoiled.reward, spoiled.parts) == (0.0, {"f2p": 1.0, "p2p": 0.5})


def test_a_partial_repair_earns_a_partial_reward_only_with_partial(pool, task):
    half = {"calc.py": BUGGY.replace("a - b", "3")}
    assert grade_files(pool, task, half).reward == 0.0
    partial = Task.from_json(
        {**task.to_json(), "grader": {"kind": "suite", **SuiteGrader(FAIL, PASS, partial=True).to_json()}}
    )
    assert grade_files(pool, partial, half).reward == 0.5


def test_tests_of_a_deleted_folder_are_restored_and_code_may_be_moved(pool, task, repository):
    moved = {"calc.py": Change("file", b"from core.calc import add, double\n"), "core": Change("folder", mode=0o755)}
    moved["core/calc.py"] = Change("file", RIGHT.encode())
    assert asyncio.run(grade(task, {**moved, "tests": GONE, "pytest.ini": GONE}, pool)).reward == 1.0
    assert asyncio.run(grade(task, {"calc.py": GONE}, pool)).parts == {"f2p": 0.0, "p2p": 0.0}


def test_hidden_tests_replace_those_of_the_workspace(pool, task, tmp_path):
    hidden = lay(
        tmp_path, {"tests/test_more.py": "from calc import add\n\ndef test_more():\n    assert add(5, 6) == 11\n"}
    )
    grader = SuiteGrader(("tests/test_more.py::test_more",), PASS, tests=hidden)
    hiding = Task.from_json({**task.to_json(), "grader": {"kind": "suite", **grader.to_json()}})
    assert grade_files(pool, hiding, {"calc.py": RIGHT}).reward == 1.0
    assert grade_files(pool, hiding, {"tests/test_more.py": "def test_more():\n    pass\n"}).reward == 0.0


def test_dying_sandboxes_are_replaced_and_grades_are_reused_for_the_same_submission_only(dying_pool, task):
    pool, cache = dying_pool(range(2)), ResultCache()
    first = grade_files(pool, task, {"calc.py": RIGHT}, cache)
    assert first.reward == 1.0 and len(pool.sandboxes) == 3
    assert grade_files(pool, task, {"calc.py": RIGHT, "tests/test_calc.py": "not graded"}, cache) == first
    assert (cache.hits, cache.runs) == (1, 1)
    assert grade_files(pool, task, {"calc.py": BUGGY}, cache).reward == 0.0


def test_a_missing_test_has_failed(pool, task):
    for missing in ("tests/test_calc.py::test_nothing", "tests/test_nothing.py::test_a"):
        grader = SuiteGrader((*FAIL, missing), PASS)
        other = Task.from_json({**task.to_json(), "grader": {"kind": "suite", **grader.to_json()}})
        result = grade_files(pool, other, {"calc.py": RIGHT})
        assert (result.reward, result.parts) == (0.0, {"f2p": pytest.approx(2 / 3), "p2p": 1.0})
        assert f"{missing} missing" in result.detail


ODD_TESTS = """
import sys, unittest
import pytest
from calc import add

@pytest.mark.xfail(reason="no big numbers")
def test_known_bug():
    assert add(1, 2) == -1

@pytest.mark.skipif(sys.platform == "linux", reason="Windows only")
def test_windows():
    assert add(1, 2) == 3

@pytest.mark.parametrize("value, unit", [(3, "log(photon / s)"), (5, "mag(ct/s) [x]"), (7, "log(photon * m)")])
def test_units(value, unit):
    assert add(value, 1) == value + 1

class TestPrices(unittest.TestCase):
    def test_prices(self):
        for count in range(3):
            with self.subTest(count=count):
                if count == 1:
                    self.skipTest("not sold alone")
                self.assertEqual(add(count, 1), count + 1)
"""


@pytest.mark.parametrize(
    ("fail_to_pass", "pass_to_pass", "detail"),
    [
        (("test_units[3-log(photon", "test_units[5-mag(ct/s)"), (), "2 of 2 failing tests repaired"),
        (("test_units[7-log(photon * m)]", "TestPrices::test_prices"), (), "2 of 2 failing tests repaired"),
        (("test_units[3-log(photon",), ("test_known_bug", "test_windows"), "2 of 2 passing tests kept"),
        (("test_known_bug",), (), "1 of 1 failing tests repaired"),
        (("test_windows",), (), "test_windows skipped: "),
    ],
)
def test_outcomes_count_as_in_swe_bench(pool, task, tmp_path, fail_to_pass, pass_to_pass, detail):
    hidden = lay(tmp_path, {"tests/test_odd.py": ODD_TESTS})
    names = [[f"tests/test_odd.py::{name}" for name in group] for group in (fail_to_pass, pass_to_pass)]
    odd = replace(task, grader=SuiteGrader(*map(tuple, names), tests=hidden, timeout_s=10))
    right = grade_files(pool, odd, {"calc.py": RIGHT})
    assert (right.reward, detail in right.detail) == (float(fail_to_pass != ("test_windows",)), True), right.detail


def test_a_timeout_scores_nothing_and_is_not_cached(pool, task):
    slow = Task.from_json({**task.to_json(), "grader": {"kind": "suite", **SuiteGrader(FAIL, timeout_s=1).to_json()}})
    cache = ResultCache()
    for _ in range(2):
        result = grade_files(pool, slow, {"calc.py": BUGGY.replace("return a - b", "while True: pass")}, cache)
        assert (result.reward, result.detail) == (0.0, "the time is over")
    assert (cache.hits, cache.runs) == (0, 2)


def test_a_plugin_that_is_installed_may_replace_parts_of_pytest(pool, task, packages, tmp_path):
    # hypothesis does this. A replacement by the workspace is still detected.
    shutil.copytree(packages, tmp_path / "more")
    patch = "from _pytest import fixtures\nfixtures.FixtureFunctionMarker.__call__ = lambda self, function: function\n"
    entry = {"busy-1.0.dist-info/entry_points.txt": "[pytest11]\nbusy = busy\n"}
    lay(tmp_path / "more", {"busy.py": patch, "busy-1.0.dist-info/METADATA": "Name: busy\nVersion: 1.0\n", **entry})
    task = replace(task, packages=tmp_path / "more")
    assert grade_files(pool, task, {"calc.py": RIGHT}).reward == 1.0
    assert "functions of the test framework" in grade_files(pool, task, {"calc.py": patch + RIGHT}).detail


def test_names_and_links_of_any_bytes_are_graded_and_cached(pool, task, tmp_path):
    tests = lay(tmp_path / "tests", {"tests/test_calc.py": TESTS})
    (tests / "away").symlink_to(os.fsdecode(b"\xfe"))
    task = replace(task, grader=replace(task.grader, tests=tests))
    cache = ResultCache()
    for _ in range(2):
        assert grade_files(pool, task, {"calc.py": RIGHT, os.fsdecode(b"\xff.txt"): ""}, cache).reward == 1.0
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


def test_a_report_cut_by_too_small_limits_is_an_error(narrow_pool, talkative):
    cache = ResultCache()
    message = "report on the 40 tests of task r-0 does not fit into SandboxLimits.output_kb = 1; make the pool"
    for _ in range(2):
        with pytest.raises(UserError, match=message):
            grade_files(narrow_pool, talkative, {"calc.py": RIGHT}, cache)
    assert (cache.runs, cache.hits) == (2, 0)


FLOOD = """
import os
for fd in range(3, 64):
    try:
        os.write(fd, os.urandom(1 << 18).hex().encode() + b"\\n")
    except OSError:
        pass
"""


def test_code_that_floods_the_report_fails_without_an_error(task):
    cache = ResultCache()
    pool = LocalSandboxPool(SandboxLimits(timeout_s=10, output_kb=64), size=1)  # more than a report of ours needs
    try:
        assert grade_files(pool, task, {"calc.py": RIGHT}).reward == 1.0
        for _ in range(2):
            flooded = grade_files(pool, task, {"calc.py": FLOOD + RIGHT}, cache)
            assert flooded.reward == 0.0 and "bytes of the report are lost" in flooded.detail
    finally:
        pool.kill()
    assert cache.runs == 2


def test_files_are_read_outside_the_event_loop_thread(pool, task, tmp_path, monkeypatch):
    tests = lay(tmp_path / "tests", {"tests/test_calc.py": TESTS})
    task = replace(task, grader=replace(task.grader, tests=tests))
    read_bytes, threads = Path.read_bytes, []

    def watched(path):
        if path.name == "test_calc.py":
            threads.append(threading.current_thread())
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", watched)
    changes = {"calc.py": Change("file", RIGHT.encode()), "tests": GONE, "sub": GONE}
    asyncio.run(grade(task, changes, pool))
    assert len(threads) == 2 and threading.current_thread() not in threads
