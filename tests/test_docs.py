"""Paths, names, commands and config fields in the pages, and tests in the scripts of CI, exist."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from composer_jax.errors import UserError
from configs import base, tiny
from launch.config_file import fields, load_config, with_config_path

ROOT = Path(__file__).parents[1]
# Without docs/tasks.md, whose tests/test.sh is a file of Harbor's format.
PAGES = (
    "CONTRIBUTING.md",
    "README.md",
    *(f"docs/{name}.md" for name in "bases design glossary performance prepare_data results rewards science".split()),
    *(f"docs/{name}.md" for name in "base_evals fleet gpu sandbox scale tpu workers".split()),
)
ALL_PAGES = (*PAGES, "docs/tasks.md", "CHANGELOG.md")
FIELDS = dict(fields(tiny.get_config())) | dict(fields(base.get_config()))
FOLDERS = ("benchmarks", "composer_jax", "configs", "docs", "examples", "launch", "notebooks", "tests")


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page):
    paths = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./]+)`", (ROOT / page).read_text(encoding="utf-8"))
    missing = sorted({path for path in paths if not (ROOT / path).exists()})
    assert not missing, f"{page} names {', '.join(missing)}"


@pytest.mark.parametrize("page", ALL_PAGES)
def test_commands_exist(page):
    modules = re.findall(r"python -m ((?:benchmarks|examples|launch)\.\w+)", (ROOT / page).read_text(encoding="utf-8"))
    missing = {name for name in modules if not (ROOT / f"{name.replace('.', '/')}.py").exists()}
    assert not missing, f"{page} runs {', '.join(sorted(missing))}"


@pytest.mark.parametrize("page", ALL_PAGES)
def test_configs_and_their_fields_exist(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in set(re.findall(r"--config=([a-z][\w./]*(?::\w+)?)", text)):
        assert load_config(with_config_path(["docs", f"--config={name}"])), name
    unknown = {path for path in re.findall(r"--config\.([a-z][\w.]*\w)", text) if path not in FIELDS}
    assert not unknown, f"{page} sets {', '.join(sorted(unknown))}"


def test_a_config_that_does_not_exist_is_noticed():
    with pytest.raises(UserError, match="no packaged config 'tinny'"):
        load_config(with_config_path(["docs", "--config=tinny:smoke"]))


def test_tables_of_contributing_are_in_their_files():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tables = re.findall(r"`([A-Z_]{4,})` in `([\w./]+)`", text)
    assert len(tables) > 8
    for name, path in tables:
        assert re.search(rf"^{name}\b", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), f"{path}: {name}"


def test_config_fields_of_contributing_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    sections = {path.split(".")[0] for path in FIELDS}
    named = {name for name in re.findall(r"`([a-z]+(?:\.\w+)+)`", text) if name.split(".")[0] in sections}
    assert len(named) > 10
    patterns = {name: re.escape(name).replace("NAME", r"\w+") + r"(\.|$)" for name in named}
    unknown = [name for name, pattern in patterns.items() if not any(re.match(pattern, path) for path in FIELDS)]
    assert not unknown, f"CONTRIBUTING.md names {', '.join(unknown)}"


def test_the_row_with_the_newest_jax_names_tests_that_exist():
    script = (ROOT / ".ci" / "jax_next").read_text(encoding="utf-8")
    listed = re.search(r"^tests=\((.*?)^\)", script, re.MULTILINE | re.DOTALL)
    command = f"cd {shlex.quote(str(ROOT))} && ls -d {' '.join(listed[1].split())}"
    assert subprocess.run(["bash", "-c", command], capture_output=True).returncode == 0
