"""The files that a scrubbed copy holds and those that it excludes."""

import os

import pytest

from composer_jax.errors import UserError
from composer_jax.tasks.repository.baseline_run import copy_scrubbed
from tests.tasks.conftest import lay

KEPT = [
    "pkg/a.py",
    "tests/test_a.py",
    "README.md",
    "pkg/build/tool.py",
    "docs/distance.txt",
    ".github/ci.yml",
    "tests/data/a.patch",
]
GONE = [
    ".git/HEAD",
    "pkg/__pycache__/a.cpython-311.pyc",
    ".mypy_cache/3.11/a.data.json",
    ".pytest_cache/v",
    ".ruff_cache/x",
    "build/lib/pkg/a.py",
    "dist/pkg.whl",
    "pkg.egg-info/PKG-INFO",
    "src/pkg.dist-info/RECORD",
    "pkg/a.py.orig",
    "pkg/a.py.rej",
    "pkg/a.py~",
    "fix.patch",
    ".coverage",
    ".tox/py/a.py",
]


def test_caches_builds_and_history_are_left_out(tmp_path):
    source = lay(tmp_path / "source", {path: "x" for path in KEPT + GONE})
    (source / "pkg" / "a.py").chmod(0o755)
    excluded = copy_scrubbed(source, tmp_path / "copy")
    copied = {
        path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("*") if path.is_file()
    }
    assert copied == set(KEPT)
    assert (tmp_path / "copy" / "pkg" / "a.py").stat().st_mode & 0o777 == 0o755
    assert {".git", "build", "dist", "pkg/__pycache__", "pkg/a.py.orig", ".tox"} <= set(excluded)


def test_links_that_lead_outside_are_excluded(tmp_path):
    source = lay(tmp_path / "source", {"pkg/a.py": "x", "outside": "y"})
    (source / "inside").symlink_to("pkg/a.py")
    (source / "folder").symlink_to("pkg")
    (source / "absolute").symlink_to("/etc")
    (source / "up").symlink_to("../secret")
    os.mkfifo(source / "pipe")
    excluded = copy_scrubbed(source, tmp_path / "copy")
    assert excluded == ["absolute", "pipe", "up"]
    assert (tmp_path / "copy" / "inside").readlink().as_posix() == "pkg/a.py"
    assert (tmp_path / "copy" / "folder").is_symlink()


def test_a_missing_source_and_an_existing_target_are_refused(tmp_path):
    with pytest.raises(UserError, match="nowhere is not a folder"):
        copy_scrubbed(tmp_path / "nowhere", tmp_path / "copy")
    lay(tmp_path, {"a/b": ""})
    with pytest.raises(UserError, match="already there"):
        copy_scrubbed(tmp_path / "a", tmp_path / "a")
