"""Grading by hidden cases: only right values score. Each forgery is a real submission in a real sandbox."""

import asyncio

import pytest

from composer_jax.sandbox import Change, LocalSandboxPool, SandboxDied, SandboxLimits
from composer_jax.tasks.grader import Case, CaseGrader
from composer_jax.tasks.grading import grade
from composer_jax.tasks.grading.cases import is_submitted, submitted_changes
from composer_jax.tasks.grading.judge_cases import read_report, same_value
from composer_jax.tasks.result_cache import ResultCache
from composer_jax.tasks.retry import ATTEMPTS
from composer_jax.tasks.task import Task
from tests.tasks.conftest import as_changes

BUGGY = "def scale(x):\n    return x + 3\n\ndef above(x):\n    return x > 2\n"
RIGHT = BUGGY.replace("x + 3", "x * 3")
CASES = (
    Case("tools", "scale", (5,), 15),
    Case("tools", "scale", (7,), 21),
    Case("tools", "above", (3,), True),
)


def make_task(cases=CASES, timeout_s=3.0, **files):
    return Task(
        id="t-0",
        family="bugfix",
        split="train",
        instruction="Fix it.",
        files={"tools.py": BUGGY, "run_tests.py": "print('PASS 3')\n", "cases.json": "[]", **files},
        tools=("finish",),
        grader=CaseGrader(tuple(cases), timeout_s),
    )


TASK = make_task()


def graded(pool, files, task=TASK, cache=None, seed=0):
    results = cache and cache.of_episode(task.id, seed)
    return asyncio.run(grade(task, as_changes({**task.files, **files}), pool, results))


def test_right_and_wrong(pool):
    assert graded(pool, {"tools.py": RIGHT}).reward == 1.0
    wrong = graded(pool, {})
    assert wrong.reward == 0.0
    assert wrong.parts == {"hidden": 1 / 3}
    assert wrong.detail == "1 of 3 hidden cases pass; first failure: tools.scale(5): 8 instead of 15"


FORGE_LINES = """
import json, os
for fd in range(3, 40):
    for index, value in enumerate((15, 21, True)):
        try:
            os.write(fd, (json.dumps({"index": index, "value": value}) + "\\n").encode())
        except OSError:
            pass
"""
FAKE_WRITER = """
import json
json.dumps = lambda *args, **more: '{"index": 0, "value": 15}'
"""
EQUALS_ALL = """
class Any(int):
    def __eq__(self, other):
        return True
    __hash__ = int.__hash__
def scale(x):
    return Any(0)
def above(x):
    return x > 2
"""
SEARCH = """
import gc
wants = [o["want"] for o in gc.get_objects() if isinstance(o, dict) and "want" in o]
def scale(x):
    return wants[0] if wants else 0
"""
FLOOD = """
import os
for fd in range(3, 40):
    try:
        os.write(fd, b"x" * 10_000_000)
    except OSError:
        pass
"""
FORGERIES = {
    "prints that it passes": "print('PASS 8')\nprint('{\"index\": 0, \"value\": 15}')\n" + BUGGY,
    "leaves at import": "import sys\nsys.exit(0)\n",
    "leaves without a trace": "import os\nos._exit(0)\n",
    "leaves when called": BUGGY.replace("return x + 3", "raise SystemExit(0)"),
    "replaces the writer": FAKE_WRITER + BUGGY,
    "equals everything": EQUALS_ALL,
    "returns text": BUGGY.replace("return x + 3", "return str(x * 3)"),
    "returns a float": BUGGY.replace("return x + 3", "return x * 3.0"),
    "returns a number for a truth": RIGHT.replace("return x > 2", "return int(x > 2)"),
    "returns a tuple": BUGGY.replace("return x + 3", "return (x * 3,)"),
    "returns something endless": BUGGY.replace("return x + 3", "a = []\n    a.append(a)\n    return a"),
    "is not Python": "def scale(x:\n",
    "is empty": "",
    "looks for the answers": SEARCH,
    "floods the report": FLOOD + BUGGY,
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forgeries_do_not_score(pool, forgery):
    result = graded(pool, {"tools.py": FORGERIES[forgery]})
    assert result.reward == 0.0
    assert result.parts["hidden"] < 1.0


def test_forged_lines_in_the_report_gain_nothing(pool):
    # The forger would need to know the answers, and a call that is reported twice counts as not reported.
    result = graded(pool, {"tools.py": FORGE_LINES + BUGGY})
    assert result.reward == 0.0
    assert "reported twice" in result.detail


CHEAT = "print('PASS 3')\nimport sys\nsys.modules['tools'] = type('T', (), {'scale': lambda x: 15})\n"
PROTECTED = ["run_tests.py", "cases.json", "call_cases.py", "conftest.py", "test_tools.py", "sitecustomize.py"]


@pytest.mark.parametrize("path", PROTECTED)
def test_changes_to_tests_are_not_graded(pool, path):
    assert not is_submitted(path)
    assert graded(pool, {path: CHEAT}).reward == 0.0


def test_changes_to_tests_do_not_spoil_a_right_solution(pool):
    assert graded(pool, {"tools.py": RIGHT, **dict.fromkeys(PROTECTED, CHEAT)}).reward == 1.0


def test_helpers_may_be_added_and_modules_deleted(pool):
    files = {
        "tools.py": RIGHT.replace("x * 3", "help_out(x)"),
        "helper.py": "def help_out(x):\n    return x * 3\n",
    }
    files["tools.py"] = "from helper import help_out\n" + files["tools.py"]
    assert graded(pool, files).reward == 1.0
    rest = {path: text for path, text in TASK.files.items() if path != "tools.py"}
    assert "tools.py" not in submitted_changes(TASK, as_changes(rest))
    assert asyncio.run(grade(TASK, as_changes(rest), pool)).detail.endswith("tools.scale(5): ModuleNotFoundError")


BROKEN_WORKSPACES = {
    "replaces the runner by a folder": {
        "run_tests.py": Change("folder", mode=0o755),
        "run_tests.py/module.py": Change("file", b""),
    },
    "replaces the cases by a folder": {
        "cases.json": Change("folder", mode=0o755),
        "cases.json/module.py": Change("file", b""),
    },
    "fills the workspace": {f"large{number}.py": Change("file", bytes(1 << 20)) for number in range(3)},
}


@pytest.fixture(scope="module")
def small_pool():
    pool = LocalSandboxPool(SandboxLimits(timeout_s=10, workspace_mb=2), size=1)
    yield pool
    pool.kill()


@pytest.mark.parametrize("broken", BROKEN_WORKSPACES)
def test_a_submission_that_breaks_its_workspace_scores_nothing(small_pool, broken):
    cache = ResultCache()
    changes = {**as_changes({**TASK.files, "tools.py": RIGHT}), **BROKEN_WORKSPACES[broken]}
    for _ in range(2):
        result = asyncio.run(grade(TASK, changes, small_pool, cache.of_episode(TASK.id, 0)))
        assert (result.reward, result.parts) == (0.0, {"hidden": 0.0})
        assert result.detail.startswith("the changes cannot be made: ")
    assert (cache.runs, cache.hits) == (1, 1), "the same changes fail again"


def test_protected_paths():
    assert not any(map(is_submitted, ["test_a.py", "a_test.py", "tests/a.py", "pkg/tests/x.py", "data.txt", "a.pyc"]))
    assert all(map(is_submitted, ["a.py", "pkg/attest.py", "latest.py", "contests/a.py"]))


def test_failures_hide_no_other_case_and_a_timeout_is_not_cached(pool):
    cache = ResultCache()
    slow = RIGHT.replace("return x > 2", "while True: pass")
    for _ in range(2):
        result = graded(pool, {"tools.py": slow}, make_task(timeout_s=0.5), cache)
        assert (result.reward, result.parts) == (0.0, {"hidden": 2 / 3}) and "no value (timeout)" in result.detail
    assert (cache.hits, cache.runs) == (0, 2)
    result = graded(pool, {"tools.py": RIGHT.replace("return x * 3", "raise ValueError(x)")})
    assert result.parts == {"hidden": 1 / 3} and "ValueError" in result.detail


def test_results_are_reused_for_the_same_submission_only(pool):
    cache = ResultCache()
    first = graded(pool, {"tools.py": RIGHT}, cache=cache)
    again = graded(pool, {"tools.py": RIGHT, "notes.txt": "not graded"}, cache=cache)
    assert first == again and (cache.hits, cache.runs) == (1, 1)
    assert graded(pool, {"tools.py": BUGGY}, cache=cache).reward == 0.0
    other = make_task(cases=CASES[:1])
    assert graded(pool, {"tools.py": RIGHT}, other, cache).parts == {"hidden": 1.0}
    assert (cache.hits, cache.runs) == (1, 3)


def test_attempts_draw_the_grade_of_a_flaky_submission_for_themselves(pool):
    cache = ResultCache()
    flaky = RIGHT.replace("return x * 3", "return x * 3 if random.random() < 0.5 else None")
    flaky, single = "import random\n" + flaky, make_task(cases=CASES[:1])
    rewards = [graded(pool, {"tools.py": flaky}, single, cache, seed).reward for seed in range(20)]
    assert set(rewards) == {0.0, 1.0}, "wrong once in 500,000 runs"
    again = [graded(pool, {"tools.py": flaky}, single, cache, seed).reward for seed in range(20)]
    assert again == rewards and (cache.runs, cache.hits) == (20, 20)


def test_dying_sandboxes_are_replaced_and_an_outage_is_an_error(dying_pool):
    pool = dying_pool(range(ATTEMPTS - 1))
    assert graded(pool, {"tools.py": RIGHT}).reward == 1.0
    assert len(pool.sandboxes) == ATTEMPTS
    pool = dying_pool(range(99))
    with pytest.raises(SandboxDied):
        graded(pool, {"tools.py": RIGHT})
    assert len(pool.sandboxes) == ATTEMPTS


def test_same_value_compares_types():
    assert same_value([1, {"a": None}], [1, {"a": None}])
    for value, want in [(1, True), (True, 1), (1.0, 1), ("1", 1), ([1], [True]), ([1], [1, 2]), (None, 0)]:
        assert not same_value(value, want)
    assert not same_value({"a": 1}, {"a": 1.0})
    assert not same_value({"a": 1}, {"b": 1})


def test_malformed_lines_of_a_report_are_ignored():
    report = "\n".join(["", "{", "[1]", "null", '{"index": true, "value": 1}', '{"index": 0}', "9" * 5000, "[" * 9999])
    assert read_report(report) == ({}, {0: "None"})
