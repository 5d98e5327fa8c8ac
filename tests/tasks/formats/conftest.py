"""A small repository with its history, as a mirror, and rows about it."""

import importlib
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from composer_jax.tasks.formats import ReadOptions

BUGGY = "def double(x):\n    return x + 2\n\n\ndef half(x):\n    return x / 2\n"
RIGHT = BUGGY.replace("x + 2", "x * 2")
OLD_TEST = "from calc import half\n\n\ndef test_half():\n    assert half(4) == 2\n"
NEW_TEST = "from calc import double, half\n\n\ndef test_half():\n    assert half(4) == 2\n\n\n"
NEW_TEST += "def test_double():\n    assert double(3) == 6\n"


def run_git(folder, *words):
    """Runs git with an author and without the configuration of this machine."""
    variables = {"PATH": os.environ["PATH"], "HOME": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for role in ("AUTHOR", "COMMITTER"):
        variables |= {f"GIT_{role}_NAME": "a", f"GIT_{role}_EMAIL": "a@b", f"GIT_{role}_DATE": "2024-01-01T00:00:00Z"}
    command = ["git", "-c", "init.defaultBranch=main", *words]
    return subprocess.run(command, cwd=folder, env=variables, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder, files):
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    run_git(folder, "add", "--all")
    run_git(folder, "commit", "--quiet", "-m", "a step")
    return run_git(folder, "rev-parse", "HEAD")


@pytest.fixture
def project(tmp_path):
    """A mirror acme__calc: `base` has a bug, the commit after it repairs it and tests it."""
    mirrors = tmp_path / "mirrors"
    folder = mirrors / "acme__calc"
    folder.mkdir(parents=True)
    run_git(folder, "init", "--quiet")
    attributes = "tests export-ignore\n*.py text eol=lf\n"  # what only `git archive` minds
    base = commit(folder, {"calc.py": BUGGY, "tests/test_calc.py": OLD_TEST, ".gitattributes": attributes})
    fixed = commit(folder, {"calc.py": RIGHT, "tests/test_calc.py": NEW_TEST})
    patch = run_git(folder, "diff", base, fixed, "--", "calc.py") + "\n"
    test_patch = run_git(folder, "diff", base, fixed, "--", "tests") + "\n"
    return SimpleNamespace(
        folder=folder,
        mirrors=mirrors,
        base=base,
        fixed=fixed,
        patch=patch,
        test_patch=test_patch,
        buggy=BUGGY,
        right=RIGHT,
        new_test=NEW_TEST,
        git=run_git,
        commit=commit,
        options=ReadOptions(repos=mirrors, store=tmp_path / "store"),
    )


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    """A folder of packages with pytest for the project and nothing else of this environment."""
    folder = tmp_path_factory.mktemp("packages")
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        shutil.copytree(Path(importlib.import_module(name).__file__).parent, folder / "acme__calc" / name)
    shutil.copy(importlib.import_module("py").__file__, folder / "acme__calc" / "py.py")
    return folder


@pytest.fixture
def bench_row(project):
    """A row of SWE-bench about the project."""
    return {
        "repo": "acme/calc",
        "instance_id": "acme__calc-7",
        "base_commit": project.base,
        "patch": project.patch,
        "test_patch": project.test_patch,
        "problem_statement": "double(3) is 5",
        "hints_text": "look at double",
        "created_at": "2024-01-01T00:00:00Z",
        "version": "1.0",
        "FAIL_TO_PASS": '["tests/test_calc.py::test_double"]',
        "PASS_TO_PASS": '["tests/test_calc.py::test_half"]',
        "environment_setup_commit": project.base,
    }
