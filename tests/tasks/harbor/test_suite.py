"""Repository tasks on disk: a written task is read back, and its directory works without this library."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace

import pytest

from composer_jax.errors import UserError
from composer_jax.tasks import ScriptGrader, SuiteGrader, Task
from composer_jax.tasks.harbor import read_task, write_task
from tests.demo.generate import generate
from tests.tasks.conftest import lay

BROKEN = "def add(a, b):\n    return a - b\n"
TEXT = """from pkg.calc import add


def test_add():
    assert add(1, 2) == 3


def test_zero():
    assert add(0, 0) == 0
"""
GOLD = {"pkg/calc.py": BROKEN.replace("-", "+"), "pkg/extra.py": "x = 1", "pkg/left.py": None}


@pytest.fixture
def task(tmp_path, packages):
    files = {"pkg/__init__.py": "", "pkg/calc.py": BROKEN, "pkg/left.py": "", "tests/test_calc.py": TEXT}
    repository = lay(tmp_path / "repository", {**files, "data.bin": b"\xff\x00", "pytest.ini": "[pytest]\n"})
    (repository / "link").symlink_to("pkg")
    return Task(
        id="r-0",
        family="repository",
        split="heldout",
        instruction="Repair it.\n",
        files={"notes.txt": "on top\r\n"},
        tools=("repository/*",),
        grader=SuiteGrader(("tests/test_calc.py::test_add",), ("tests/test_calc.py::test_zero",), timeout_s=20),
        metadata={"kind": "stub", "gold": GOLD, "requirements": ["pytest==9.2.0"]},
        repository=repository,
        packages=packages,
    )


def test_a_written_task_is_read_back(task, tmp_path):
    root = write_task(task, tmp_path / "task")
    back = read_task(root)
    grader = replace(task.grader, tests=root / "tests" / "repo")
    assert back == replace(task, files={}, repository=root / "environment" / "repo", grader=grader)
    assert (back.repository / "data.bin").read_bytes() == b"\xff\x00"
    assert (back.repository / "notes.txt").read_bytes() == b"on top\r\n"
    assert os.readlink(back.repository / "link") == "pkg"
    again = read_task(write_task(back, tmp_path / "again"))
    assert again.grader.fail_to_pass == task.grader.fail_to_pass and again.metadata == task.metadata


def test_the_manifest_lists_tests_and_requirements(task, tmp_path):
    root = write_task(task, tmp_path / "task")
    described = tomllib.loads((root / "task.toml").read_text())["metadata"]["composer"]
    assert (described["kind"], described["id"]) == ("stub", "r-0")
    assert described["fail_to_pass"] == ["tests/test_calc.py::test_add"]
    assert described["requirements"] == ["pytest==9.2.0"]
    assert (root / described["packages"]).resolve() == task.packages.resolve()
    dockerfile = (root / "environment" / "Dockerfile").read_text()
    assert "pip install --no-cache-dir 'pytest==9.2.0'\n" in dockerfile
    patch = (root / "solution" / "gold.patch").read_text()
    assert "-    return a - b\n+    return a + b\n" in patch and "\\ No newline at end of file" in patch


def test_the_directory_works_on_its_own(task, tmp_path):
    root = write_task(task, tmp_path / "task")
    workspace, logs = tmp_path / "workspace", tmp_path / "logs"
    shutil.copytree(root / "environment" / "repo", workspace, symlinks=True)

    def verify():
        command = [
            sys.executable,
            str(root / "tests" / "verify_suite.py"),
            str(root / "tests"),
            str(workspace),
            str(logs),
        ]
        subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
        return json.loads((logs / "reward.json").read_text())

    # Changes of the agent to tests and their configuration are undone.
    lay(workspace, {"tests/test_calc.py": "def test_add():\n    pass\n\n\ndef test_zero():\n    pass\n"})
    lay(workspace, {"conftest.py": "collect_ignore = ['tests']\n", "tests/conftest.py": "import os\nos._exit(0)\n"})
    assert verify() == {"reward": 0.0, "f2p": 0.0, "p2p": 1.0}
    assert not (workspace / "conftest.py").exists()
    solve = [sys.executable, str(root / "solution/solve.py"), str(root / "solution/oracle.json"), str(workspace)]
    subprocess.run(solve, check=True)
    assert verify() == {"reward": 1.0, "f2p": 1.0, "p2p": 1.0}
    assert not (workspace / "pkg" / "left.py").exists()


def test_missing_packages_and_other_graders_are_refused(task, tmp_path):
    root = write_task(task, tmp_path / "task")
    manifest = root / "task.toml"
    manifest.write_text(manifest.read_text().replace("/packages", "/gone"))
    with pytest.raises(UserError, match="are not at .*gone.*pip install --target .* 'pytest==9.2.0'"):
        read_task(root)
    with pytest.raises(UserError, match="graded by a script of its own"):
        write_task(replace(task, grader=ScriptGrader(tmp_path)), tmp_path / "script")


def test_the_verifier_gets_hidden_tests_and_all_other_protected_files(task, tmp_path):
    hidden = lay(tmp_path / "hidden", {"tests/test_calc.py": TEXT, "tests/data.txt": "new"})
    lay(task.repository, {"conftest.py": "", "tests/data.txt": "old", "tests/test_more.py": TEXT})
    files = {**task.files, "tests/test_top.py": TEXT, "tests/test_calc.py": "not this\n"}
    lay(task.repository, {"tests/linked/evil.txt": ""})
    away = tmp_path / "away"
    away.mkdir()
    (hidden / "tests/linked").symlink_to(away)
    task = replace(task, files=files, grader=replace(task.grader, tests=hidden))
    root = write_task(task, tmp_path / "task")
    assert not list(away.iterdir()), "nothing is written through a link"
    there = {path.relative_to(root / "tests/repo").as_posix() for path in (root / "tests/repo").rglob("*.*")}
    names = {"test_calc.py", "data.txt", "test_more.py", "test_top.py"}
    assert there == {"conftest.py", "pytest.ini", *(f"tests/{name}" for name in names)}
    assert (root / "tests/repo/tests/data.txt").read_text() == "new"
    assert (root / "tests/repo/tests/test_calc.py").read_text() == TEXT
    assert read_task(root).grader.tests == root / "tests/repo"


def test_the_network_is_written_and_an_image_is_refused(task, tmp_path):
    for network in (False, True):
        root = write_task(replace(task, network=network), tmp_path / str(network))
        assert tomllib.loads((root / "task.toml").read_text())["environment"]["allow_internet"] is network
        assert read_task(root).network is network
    with pytest.raises(
        UserError, match="task r-0 has image, which a directory of a task graded by a suite cannot hold"
    ):
        write_task(replace(task, image="some/image"), tmp_path / "image")


def test_parts_that_a_directory_of_hidden_cases_cannot_hold_are_refused(tmp_path):
    task = replace(generate("bugfix", "train", 0, 0), repository=tmp_path, network=True)
    with pytest.raises(
        UserError, match="has repository and network, which a directory of a task graded by hidden cases"
    ):
        write_task(task, tmp_path / "task")
    assert not (tmp_path / "task").exists()
