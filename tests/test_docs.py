"""Paths and names in the pages for contributors, and in the scripts of CI, exist."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("CONTRIBUTING.md", "docs/glossary.md", "README.md", "docs/design.md")
FOLDERS = ("benchmarks", "composer_jax", "configs", "docs", "examples", "launch", "notebooks", "tests")


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page):
    paths = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./]+)`", (ROOT / page).read_text(encoding="utf-8"))
    missing = sorted({path for path in paths if not (ROOT / path).exists()})
    assert not missing, f"{page} names {', '.join(missing)}"


def test_tables_of_contributing_are_in_their_files():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tables = re.findall(r"`([A-Z_]{4,})` in `([\w./]+)`", text)
    assert len(tables) > 8
    for name, path in tables:
        assert re.search(rf"^{name}\b", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), f"{path}: {name}"


def test_the_row_with_the_newest_jax_names_tests_that_exist():
    script = (ROOT / ".ci" / "jax_next").read_text(encoding="utf-8")
    listed = re.search(r"^tests=\((.*?)^\)", script, re.MULTILINE | re.DOTALL)
    command = f"cd {shlex.quote(str(ROOT))} && ls -d {' '.join(listed[1].split())}"
    assert subprocess.run(["bash", "-c", command], capture_output=True).returncode == 0
