"""The notebooks run from their first cell to their last, in a kernel of the environment the tests run in."""

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.parity import smollm2
from tests.stages.command_line import pipeline_environment

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS = 900  # for the slowest cell
SHORTER = {
    "quickstart": {"from configs import tiny": "from tests.stages import smoke_config as tiny"},
    "published_model": {
        "max_tokens=48": "max_tokens=8",
        "TURNS = 3": "TURNS = 1",
        "max_turn_tokens=96": "max_turn_tokens=8",
    },
}
"""What the tests change in a notebook: a smaller network and fewer tokens."""


def shortened(path: Path) -> nbformat.NotebookNode:
    text = path.read_text()
    for long, short in SHORTER.get(path.stem, {}).items():
        assert text.count(long) == 1, long
        text = text.replace(long, short)
    return nbformat.reads(text, as_version=4)


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Runs every cell with `folder` as the working directory; raises CellExecutionError for one that fails.

    The checkout is importable: a notebook that installs composer_jax only where it is missing installs
    nothing.
    """
    client = NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env={**pipeline_environment(), "PYTHONPATH": str(ROOT)})


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("CI") != "true", reason="minutes long; CI=true bash tests/run.sh runs it")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, tmp_path):
    if "fetch_smollm2" in path.read_text():  # the model that the tests have fetched, or a skipped test without it
        (tmp_path / "models").symlink_to(smollm2.fetch().parent)
    execute(shortened(path), tmp_path)


def test_a_failing_cell_fails_the_test(tmp_path):
    cells = [nbformat.v4.new_code_cell(source) for source in ("import composer_jax\nx = 1", "assert x == 2")]
    with pytest.raises(CellExecutionError, match="assert x == 2"):
        execute(nbformat.v4.new_notebook(cells=cells), tmp_path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_clones_once_into_a_folder_that_python_takes_for_no_package(path, tmp_path, monkeypatch):
    cell = next(cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
    source = cell.source.replace('REPOSITORY = ""', 'REPOSITORY = "address"')
    commands = []

    def run(command, check):
        commands.append(command)
        if command[0] == "git":
            Path(command[-1], "composer_jax").mkdir(parents=True)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    exec(source, {})
    assert [command[0] for command in commands] == ["git", sys.executable]
    assert importlib.machinery.PathFinder.find_spec("composer_jax", [str(tmp_path)]) is None
    cloned = sys.path.pop(0)
    assert importlib.machinery.PathFinder.find_spec("composer_jax", [cloned]) is not None

    exec(source, {})  # the runtime restarted before the installation had ended
    assert [command[0] for command in commands] == ["git", sys.executable, sys.executable]
    assert sys.path.pop(0) == cloned

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "installed")
    exec(source, {})  # the runtime restarted after it
    assert len(commands) == 3 and sys.path[0] == cloned
