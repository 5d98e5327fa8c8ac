"""Which test files .ci/bare runs, and that no other file skips a test."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.optional_files import optional_files

ROOT = Path(__file__).parents[1]
OPTIONAL = {
    "mark": "@pytest.mark.skipif(True, reason='')\ndef test(): pass",
    "parity": "pytestmark = [pytest.mark.parity, pytest.mark.slow]",
    "call": "def test():\n    pytest.skip('')",
    "from": "from pytest import importorskip",
    "program": "RG = shutil.which('rg')",
    "package": "HAS_RAY = importlib.util.find_spec('ray') is not None",
    "fixture": "def test(libtpu): pass",
    "used fixture": "pytestmark = pytest.mark.usefixtures('libtpu')",
    "helper": "from tests.helpers.model import network",
    "module": "from tests.helpers import model",
}
NEEDED = {
    "string": "CODE = 'pytest.skip()'",
    "other name": "def test(which, skip): which.skip(skip)",
    "other helper": "from tests.helpers import numbers",
}


@pytest.mark.parametrize("source", [*OPTIONAL.values(), *NEEDED.values()], ids=[*OPTIONAL, *NEEDED])
def test_a_file_is_found_by_what_it_contains(source, tmp_path):
    files = {
        "tests/conftest.py": "def fixture(): pytest.skip('')",
        "tests/helpers/download.py": "def network(): pytest.skip('')",
        "tests/helpers/model.py": "from tests.helpers.download import network",
        "tests/helpers/numbers.py": "ONE = 1",
        "tests/a/test_a.py": source,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert optional_files(tmp_path) == [Path("tests/a/test_a.py")] * (source in OPTIONAL.values())


def test_a_conftest_that_skips_makes_the_files_below_it_optional(tmp_path):
    for name in ("a/conftest.py", "a/test_a.py", "a/b/test_b.py", "c/test_c.py"):
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import shutil; shutil.which('x')" if path.name == "conftest.py" else "")
    assert optional_files(tmp_path) == [Path("tests/a/b/test_b.py"), Path("tests/a/test_a.py")]


def test_those_of_this_repository_are_printed_one_a_line():
    command = [sys.executable, "-S", ROOT / "tests/optional_files.py"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed == sorted(printed) and all((ROOT / path).exists() for path in printed)
    assert {"tests/containers/test_container.py", "tests/launch/test_compile.py"} < set(printed)
    assert "tests/test_docs.py" not in printed


def test_a_skip_in_another_file_fails_the_run(tmp_path):
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/conftest.py").write_text("from tests.optional_files import pytest_sessionfinish")
    (tmp_path / "tests/optional_files.py").symlink_to(ROOT / "tests/optional_files.py")
    (tmp_path / "tests/test_a.py").write_text("import unittest\ndef test(): raise unittest.SkipTest('no reason')\n")
    command = [sys.executable, "-m", "pytest", "-n", "1"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 1 and "1 skipped in" in run.stdout.splitlines()[-1]
    assert "tests/test_a.py skips a test, but tests/optional_files.py does not find it" in run.stdout
