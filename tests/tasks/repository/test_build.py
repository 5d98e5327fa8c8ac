"""The pipeline from a small repository to validated tasks, and its stages, in real sandboxes."""

import asyncio
import json
import os
import re
import subprocess
import zipfile
from dataclasses import replace

import pytest

from composer_jax.errors import UserError
from composer_jax.sandbox import LocalSandboxPool
from composer_jax.tasks.formats import read_tasks
from composer_jax.tasks.harbor import read_task
from composer_jax.tasks.repository import baseline_run
from composer_jax.tasks.repository.baseline_run import (
    find_unreliable_tests,
    own_import_names,
    run_baseline,
    suite_command,
    trace_calls,
)
from composer_jax.tasks.repository.build import BuildRequest, build, install
from composer_jax.tasks.repository.candidate import make_candidate
from composer_jax.tasks.repository.gates import break_suite, exception_type
from composer_jax.tasks.repository.leaks import ReadableFiles
from composer_jax.tasks.repository.mutate import MUTATIONS
from composer_jax.tasks.suites.judge import PASSED
from composer_jax.tasks.suites.run import SUITE_LIMITS, SuiteReport, TestResult
from composer_jax.tasks.validate import validate
from tests.tasks.conftest import lay

CART = '''"""A cart."""


class Cart:
    def __init__(self, limit=10):
        self.limit = limit
        self.items = []

    def add(self, name, price, count=1):
        """Adds `count` items; ValueError for more than the limit in all."""
        if len(self.items) + count > self.limit:
            raise ValueError(name)
        for _ in range(count):
            self.items.append((name, price))
        return len(self.items)

    def total(self, tax=0):
        """The price of everything, with tax in percent."""
        result = 0
        for _, price in self.items:
            result += price
        return result + result * tax // 100

    async def ship(self):
        return [name for name, _ in self.items]


def cheapest(cart):
    """The name of the cheapest item, None of an empty cart."""
    if not cart.items:
        return None
    return min(cart.items, key=lambda item: item[1])[0]


def unused(x):
    return x + 1
'''
TESTS = """import asyncio
import random

import pytest

from shop.cart import Cart, cheapest


@pytest.fixture
def cart():
    cart = Cart()
    cart.add("pen", 3, 2)
    cart.add("ink", 2)
    return cart


def test_add(cart):
    assert cart.add("pad", 5) == 4


def test_limit(cart):
    assert cart.add("pad", 1, 7) == 10
    with pytest.raises(ValueError):
        cart.add("pad", 1)


def test_total(cart):
    assert cart.total() == 8
    assert cart.total(50) == 12


def test_cheapest(cart):
    assert cheapest(cart) == "ink"
    assert cheapest(Cart()) is None


def test_ship(cart):
    assert asyncio.run(cart.ship()) == ["pen", "pen", "ink"]


def test_flaky():
    assert random.SystemRandom().random() < 0.0


@pytest.mark.skip
def test_skipped():
    pass
"""
FILES = {
    "src/shop/__init__.py": "from shop.cart import Cart\n",
    "src/shop/cart.py": CART,
    "tests/test_cart.py": TESTS,
    "src/shop.egg-info/PKG-INFO": "x",
    "setup.py": "",
}
STABLE = tuple(f"tests/test_cart.py::test_{name}" for name in ("add", "limit", "total", "cheapest", "ship"))


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A git repository without a commit."""
    root = lay(tmp_path_factory.mktemp("made") / "shop", FILES)
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    return root


@pytest.fixture(scope="module")
def large_pool():
    pool = LocalSandboxPool(SUITE_LIMITS, size=4)
    yield pool
    pool.kill()


@pytest.fixture(scope="module")
def baseline(repository, packages, large_pool, tmp_path_factory):
    root = tmp_path_factory.mktemp("pristine") / "root"
    return asyncio.run(run_baseline(repository, root, large_pool, packages, runs=2))


def test_the_baseline_run_finds_the_reliable_tests(baseline):
    assert baseline.tests == STABLE
    assert set(baseline.unreliable) == {"tests/test_cart.py::test_flaky", "tests/test_cart.py::test_skipped"}
    assert baseline.import_names == ("shop",)
    assert baseline.command[-2:] == ("-o", "pythonpath=src")
    assert "src/shop.egg-info" in baseline.excluded


def test_the_trace_maps_tests_to_functions(baseline, large_pool):
    calls = asyncio.run(trace_calls(baseline, large_pool))
    assert set(calls) == set(STABLE)
    cart = "src/shop/cart.py::"
    base = {f"{cart}Cart", f"{cart}Cart.__init__", f"{cart}Cart.add"}
    assert calls[STABLE[0]] == base
    assert calls[STABLE[2]] == base | {f"{cart}Cart.total"}
    assert calls[STABLE[3]] == base | {f"{cart}cheapest"}
    assert calls[STABLE[4]] == base | {f"{cart}Cart.ship"}


def broken(baseline, large_pool, old, new, kind="stub", min_passing=1):
    assert CART.count(old) == 1
    sources = {"src/shop/cart.py": CART}
    files = {"src/shop/cart.py": CART.replace(old, new)}
    candidate = make_candidate(kind, sources, files, ["src/shop/cart.py::x"], "a change")
    readable = ReadableFiles([baseline.root])
    return asyncio.run(break_suite(candidate, baseline, large_pool, readable, min_passing))


def last_gate(breakage):
    return breakage.gates[-1].name, breakage.passed


def test_gates_accept_a_good_breakage_and_reject_the_others(baseline, large_pool):
    good = broken(baseline, large_pool, "result += price", "result -= price")
    assert good.passed and list(good.failures) == ["tests/test_cart.py::test_total"]
    assert [gate.name for gate in good.gates] == ["in time", "collects", "fails", "keeps", "leaks"]
    assert good.pass_to_pass == tuple(test for test in STABLE if "total" not in test)

    assert last_gate(broken(baseline, large_pool, "return x + 1", "return x")) == ("fails", False)
    assert last_gate(broken(baseline, large_pool, "result += price", "raise SystemExit")) == ("fails", False)
    kept = broken(baseline, large_pool, "result += price", "result -= price", min_passing=5)
    assert last_gate(kept) == ("keeps", False)
    assert last_gate(broken(baseline, large_pool, "def cheapest(", "def dearest(")) == ("collects", False)
    gone = broken(baseline, large_pool, "def cheapest(", "def dearest(", kind="delete_feature")
    assert gone.gates[-1].detail == "no test was collected"


def test_exception_types_are_read_from_pytest_messages():
    assert exception_type("assert 1 == 2\n +  where 1 = f()") == "AssertionError"
    assert exception_type("AssertionError: assert 1 == 2") == "AssertionError"
    assert exception_type("shop.errors.Missing: x") == "Missing"
    assert exception_type("NotImplementedError") == "NotImplementedError"
    assert exception_type("Failed: DID NOT RAISE <class 'ValueError'>") == "Failed"
    trace = "ImportError while importing test module\nE   ImportError: cannot import name 'x' from 'y'"
    assert exception_type(trace) == "ImportError"
    assert exception_type("") is None


def test_messages_are_equal_in_every_run(baseline, large_pool):
    breakage = broken(baseline, large_pool, "async def ship(self):", "async def ship(self):\n        return self")
    assert "<shop.cart.Cart object at 0x...>" in breakage.failures["tests/test_cart.py::test_ship"]


def test_a_timeout_rejects_a_candidate(baseline, large_pool):
    short = type("Short", (), {**vars(baseline), "timeout_s": 1.5, "sources": baseline.sources})()
    loop = broken(short, large_pool, "result += price", "while True: pass")
    assert last_gate(loop) == ("in time", False)


@pytest.fixture(scope="module")
def built(repository, packages, large_pool, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    request = BuildRequest(repository, out, count=10, packages=packages, jobs=4, runs=1, min_passing=1)
    return request, asyncio.run(build(request, large_pool))


def test_tasks_are_made_and_every_one_is_valid(built, large_pool):
    request, result = built
    assert len(result.tasks) == 10 and len(result.kinds) >= 4
    assert result.kinds["combine"] == 1 and {"stub", "delete_feature"} < set(result.kinds)
    tasks = [read_task(folder) for folder in result.tasks]
    assert len({task.id for task in tasks}) == 10 and set(read_tasks(request.out)) == set(tasks)
    verdicts = asyncio.run(validate([tasks[0], tasks[-1]], large_pool, runs=1, jobs=2))
    assert [one.verdict for one in verdicts] == ["valid"] * 2  # the gates below have graded the others
    for folder, task in zip(result.tasks, tasks, strict=True):
        gates = json.loads((folder / "solution" / "gates.json").read_text())
        assert [gate["name"] for gate in gates][-2:] == ["no-op", "gold"] and all(gate["passed"] for gate in gates)
        assert set(task.grader.fail_to_pass) | set(task.grader.pass_to_pass) == set(STABLE)
        assert 0 < task.metadata["difficulty"]["estimate"] < 1
        assert not list((folder / "environment").rglob("*.egg-info"))
    for line in (request.out / "rejected.jsonl").read_text().splitlines():
        assert not json.loads(line)["gates"][-1]["passed"]


@pytest.mark.parametrize(("jobs", "count"), [(1, 3), pytest.param(2, 10, marks=pytest.mark.slow)])
def test_the_files_do_not_depend_on_the_number_of_jobs(built, large_pool, tmp_path, jobs, count):
    request, result = built
    again = asyncio.run(build(replace(request, out=tmp_path, jobs=jobs, count=count), large_pool))
    assert [task.name for task in again.tasks] == [task.name for task in result.tasks[:count]]
    assert count < 10 or again.rejected == result.rejected

    def texts(folder):
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        # The relative path from the task to the packages differs between the folders.
        lines = {name: path.read_text().splitlines() for name, path in files.items()}
        return {name: [line for line in listed if not line.startswith("packages = ")] for name, listed in lines.items()}

    there, first = texts(tmp_path), texts(request.out)
    made = tuple(f"tasks/{task.name}/" for task in again.tasks)
    assert {name for name in first if name.startswith(made)} < set(there)
    rejected = there.pop("rejected.jsonl")
    assert first.pop("rejected.jsonl")[: len(rejected)] == rejected
    assert there.items() <= first.items()
    # Only complete tasks are there, and no unfinished ones.
    assert {name.split("/")[1] for name in there if "/" in name} == {task.name for task in again.tasks}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["baseline.json", "rejected.jsonl", "tasks"]


def test_time_limits_grow_in_steps(baseline):
    limits = [replace(baseline, seconds=seconds).timeout_s for seconds in (1.0, 1.2, 7.5, 7.6, 14.0, 40.0)]
    assert limits == [30.0, 30.0, 30.0, 60.0, 60.0, 240.0]


def test_tests_can_be_hidden_and_every_candidate_is_tried(built, large_pool, tmp_path):
    request = replace(built[0], out=tmp_path / "hidden", count=50, kinds=("stub",), hide_tests=True)
    result = asyncio.run(build(request, large_pool))
    assert set(result.kinds) == {"stub"} and 2 < len(result.tasks) < 50
    task = read_task(result.tasks[0])
    assert not (task.repository / "tests" / "test_cart.py").exists()
    assert "are run by" not in task.instruction and "tests/test_cart.py::" in task.instruction
    assert asyncio.run(validate([task], large_pool, runs=1))[0].valid


NOT_RUNNING = {
    "empty": ({"a.py": "x = 1\n"}, "the suite of .* does not run: no test was collected"),
    "failing": ({"test_a.py": "def test_a():\n    assert 0\n"}, "no test of .* passed in all of 1 runs"),
    "option of a plugin": (
        {"pytest.ini": "[pytest]\naddopts = --cov=shop\n", "test_a.py": "def test_a(): pass\n"},
        "no test was collected: unrecognized arguments: --cov=shop; install what is missing with --requirements",
    ),
    "required plugin": (
        {"pytest.ini": "[pytest]\nrequired_plugins = pytest-cov\n", "test_a.py": "def test_a(): pass\n"},
        "Missing required plugins: pytest-cov; install",
    ),
    "setting of a plugin": (
        {
            "pytest.ini": "[pytest]\nasyncio_mode = auto\nfilterwarnings = error\n",
            "test_a.py": "def test_a(): pass\n",
        },
        "PytestConfigWarning: Unknown config option: asyncio_mode; install",
    ),
    "fixture of a plugin": (
        {"test_a.py": "def test_a(mocker): pass\n"},
        r"the first: test_a.py::test_a \(error\): fixture 'mocker' not found; install",
    ),
    "import": ({"test_a.py": "import trio\n"}, "test_a.py: ModuleNotFoundError: No module named 'trio'; install"),
    "marker": (
        {
            "pytest.ini": "[pytest]\naddopts = --strict-markers\n",
            "test_a.py": "import pytest\n@pytest.mark.slow\ndef test_a(): pass\n",
        },
        "test_a.py: 'slow' not found in `markers` configuration option$",
    ),
    "skipped": ({"test_a.py": "import pytest\npytest.importorskip('trio')\n"}, "could not import 'trio'.*; install"),
    "conftest": ({"conftest.py": "import trio\n", "test_a.py": "def test_a(): pass\n"}, "named 'trio'; install"),
}


def test_suites_that_do_not_run_raise_one_sentence(large_pool, packages, tmp_path):
    async def messages():
        suites = [lay(tmp_path / name, files) for name, (files, _) in NOT_RUNNING.items()]
        runs = [run_baseline(suite, tmp_path / f"of {suite.name}", large_pool, packages, runs=1) for suite in suites]
        return await asyncio.gather(*runs, return_exceptions=True)

    for message, (_, words) in zip(asyncio.run(messages()), NOT_RUNNING.values(), strict=True):
        assert isinstance(message, UserError) and re.search(words, str(message)), message


def test_test_files_that_cannot_be_imported_are_listed(large_pool, packages, tmp_path):
    tests = {"tests/test_a.py": "def test_a(): pass\n", "tests/test_b.py": "import trio\n\ndef test_b(): pass\n"}
    suite = lay(tmp_path / "suite", tests)
    baseline = asyncio.run(run_baseline(suite, tmp_path / "root", large_pool, packages, runs=1))
    assert baseline.tests == ("tests/test_a.py::test_a",)
    assert baseline.uncollected == {"tests/test_b.py": "ModuleNotFoundError: No module named 'trio'"}


def test_a_package_reads_its_own_metadata(large_pool, packages, tmp_path):
    code = "import importlib.metadata as m\n__version__ = m.version('shop-of-ours')\n"
    test = "import shop\n\ndef test_version():\n    assert shop.__version__ == '2.5'\n"
    project = "[project]\nname = 'shop.of_ours'\nversion = '2.5'\n"
    suite = lay(tmp_path / "shop", {"pyproject.toml": project, "shop/__init__.py": code, "tests/test_shop.py": test})
    baseline = asyncio.run(run_baseline(suite, tmp_path / "root", large_pool, packages, runs=1))
    assert baseline.tests == ("tests/test_shop.py::test_version",)


def test_mutate_stands_for_all_kinds_of_mutation(tmp_path, packages):
    request = BuildRequest(tmp_path, tmp_path / "out", 1, kinds=("stub", "mutate"), packages=packages)
    assert request.kinds == ("stub", *(f"mutate:{kind}" for kind in MUTATIONS))


def test_bad_requests_are_refused(tmp_path, packages):
    lay(tmp_path, {"full/a": ""})
    for out, more, word in (
        ("out", {"kinds": ("stup",), "packages": packages}, "'stup' is not a kind of task"),
        ("out", {}, "the tests need pytest"),
        ("full", {"packages": packages}, "is not empty"),
    ):
        with pytest.raises(UserError, match=word):
            BuildRequest(tmp_path, tmp_path / out, 1, **more)


def test_the_repository_s_own_configuration_is_named(tmp_path):
    lay(tmp_path, {"setup.cfg": "[flake8]\n[tool:pytest]\naddopts = -q\n", "src/a.py": "", "b/__init__.py": ""})
    assert suite_command(tmp_path)[-4:] == ("-c", "setup.cfg", "-o", "pythonpath=src")
    lay(tmp_path, {"pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['src']\n"})
    assert suite_command(tmp_path)[-2:] == ("-c", "pyproject.toml")
    assert own_import_names(tmp_path) == ("a", "b")
    lay(tmp_path, {"tests.py": "", "b/test.py": ""})
    assert suite_command(tmp_path)[-2:] == ("-o", "python_files=test.py tests.py")
    lay(tmp_path, {"b/a_test.py": ""})
    assert suite_command(tmp_path)[-2:] == ("-c", "pyproject.toml")
    lay(tmp_path, {"pytest.ini": "[broken"})
    with pytest.raises(UserError, match="pytest.ini cannot be read"):
        suite_command(tmp_path)


def test_only_tests_in_test_files_are_reliable():
    results = {"pkg/a.py::pkg.a.f": TestResult(PASSED), "tests/test_a.py::test_a": TestResult(PASSED)}
    report = SuiteReport(results, {}, None, "")
    assert list(find_unreliable_tests([report, report])) == ["pkg/a.py::pkg.a.f"]
    other = SuiteReport({}, {}, None, "")
    assert find_unreliable_tests([report, other])["tests/test_a.py::test_a"] == "passed, not collected"


def test_the_error_has_the_message_of_the_run_in_which_the_test_failed(monkeypatch, tmp_path):
    outcomes = iter([TestResult(PASSED), TestResult("failed", message="E   AssertionError: late")])

    async def run_test_suite(*args, **kwargs):
        return SuiteReport({"test_a.py::test_a": next(outcomes)}, {}, None, "")

    monkeypatch.setattr(baseline_run, "run_test_suite", run_test_suite)
    suite = lay(tmp_path / "suite", {"test_a.py": ""})
    with pytest.raises(UserError, match=r"the first: test_a.py::test_a \(passed, failed\): AssertionError: late"):
        asyncio.run(run_baseline(suite, tmp_path / "root", None, None, runs=2))


def test_scripts_are_installed_beside_a_folder(tmp_path):
    wheel = tmp_path / "shop-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("shop-1.0.data/scripts/shop.py", "#!python\nprint('shop')\n")
        archive.writestr("shop-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: shop\nVersion: 1.0\n")
        archive.writestr("shop-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("shop-1.0.dist-info/RECORD", "shop-1.0.data/scripts/shop.py,,\n")
    scripts = install([str(wheel)], tmp_path / "packages") / "bin"
    assert (scripts / "__pycache__").is_dir()  # pip compiles a script whose name ends with .py
    assert (scripts / "shop.py").read_text() == "#!/usr/bin/env python\nprint('shop')\n"


def test_a_suite_may_start_a_hundred_threads(large_pool, packages, tmp_path):
    text = (
        "import threading\n\ndef test_threads():\n    together = threading.Barrier(101)\n    for _ in range(100):\n"
        "        threading.Thread(target=together.wait).start()\n    together.wait()\n"
    )
    suite = lay(tmp_path / "suite", {"test_all.py": text})
    assert asyncio.run(run_baseline(suite, tmp_path / "root", large_pool, packages, runs=1)).tests


def test_commits_are_undone_under_the_tests_that_came_with_them(large_pool, packages, tmp_path):
    def git(*words):
        who = {
            "GIT_AUTHOR_NAME": "a",
            "GIT_AUTHOR_EMAIL": "a@b",
            "GIT_COMMITTER_NAME": "a",
            "GIT_COMMITTER_EMAIL": "a@b",
        }
        subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, env={**os.environ, **who})

    first = CART.replace("return result + result * tax // 100", "return result")
    tests = TESTS.replace("    assert cart.total(50) == 12\n", "")
    root = lay(tmp_path / "history", {**FILES, "src/shop/cart.py": first, "tests/test_cart.py": tests})
    git("init", "-q")
    for text, suite in ((first, tests), (CART, TESTS)):
        lay(root, {"src/shop/cart.py": text, "tests/test_cart.py": suite})
        git("add", "-A")
        git("commit", "-qm", "x")
    out = tmp_path / "out"
    request = BuildRequest(root, out, 1, kinds=("revert_commit",), packages=packages, runs=1, min_passing=1)
    result = asyncio.run(build(request, large_pool))
    task = read_task(result.tasks[0])
    assert task.grader.fail_to_pass == ("tests/test_cart.py::test_total",)
    assert not (task.repository / ".git").exists()
    assert (task.repository / "src/shop/cart.py").read_text() == first
