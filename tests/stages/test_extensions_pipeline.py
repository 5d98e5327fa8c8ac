"""One extension of every kind from a file outside the repository, named by a config and used by every stage."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stages.command_line import ROOT

HERE = Path(__file__).parent
EXTENSIONS = {
    "algorithm",
    "attention",
    "attention with a cache",
    "behaviour",
    "chat format",
    "conversations",
    "data source",
    "dispatch",
    "initialiser",
    "loss",
    "metric sink",
    "optimizer",
    "task family",
    "task format",
}
CONFIG_OF_RUN = """
import json
from pathlib import Path

from ml_collections import ConfigDict


def get_config():
    return ConfigDict(json.loads(Path("{config}").read_text())["config"])
"""


def launch(entry: str, config: Path, workdir: Path, calls: Path, *python_path: Path) -> subprocess.CompletedProcess:
    """Runs an entry point in a process that finds extensions in `python_path` only."""
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, python_path)), "EXTENSION_CALLS": str(calls)}
    command = [sys.executable, "-m", entry, f"--config={config}", f"--workdir={workdir}"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_a_config_uses_extensions_from_a_file_outside_the_repository(tmp_path):
    own, workdir, calls = tmp_path / "own", tmp_path / "run", tmp_path / "calls"
    own.mkdir()
    shutil.copy(HERE / "own_extensions.py", own)
    config = Path(shutil.copy(HERE / "own_config.py", tmp_path))
    (tmp_path / "tasks.seeds").write_text("1\n2\n")

    result = launch("launch.pipeline", config, workdir, calls, own)
    assert result.returncode == 0, result.stderr
    assert set(calls.read_text().splitlines()) == EXTENSIONS
    results = json.loads((workdir / "results.json").read_text())
    for suite, episodes in (("offsets", 2), ("heldout_noted", 2)):
        assert {which: results["suites"][suite][which]["episodes"] for which in ("before", "after")} == {
            "before": episodes,
            "after": episodes,
        }
    assert results["sft"]["solutions"] == 8
    for stage in ("pretrain", "sft", "rl"):
        rows = (workdir / "metrics" / f"{stage}.jsonl").read_text().count("\n")
        assert int((workdir / f"rows_{stage}").read_text()) == rows > 0
    assert result.stdout.splitlines()[-1].startswith("offsets pass@1 ")

    # The report needs config.json and the modules that it names: neither the config file nor the tasks.
    written = (workdir / "results.json").read_bytes()
    for path in (config, tmp_path / "tasks.seeds", workdir / "results.json"):
        path.unlink()
    config = tmp_path / "config_of_run.py"
    config.write_text(CONFIG_OF_RUN.format(config=workdir / "config.json"))
    result = launch("launch.report", config, workdir, calls)
    assert result.returncode == 2 and "own_extensions" in result.stderr.splitlines()[-1]
    result = launch("launch.report", config, workdir, calls, own)
    assert result.returncode == 0, result.stderr
    assert (workdir / "results.json").read_bytes() == written
