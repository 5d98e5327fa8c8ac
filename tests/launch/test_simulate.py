"""launch.simulate as a user runs it, for a small network, without TPUs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch import hosts, simulate
from tests.launch.in_process import run_here
from tests.scale.configuration import FIELDS

ROOT = Path(__file__).parents[2]


def simulated(*arguments: str) -> subprocess.CompletedProcess:
    fields = [f"--config.{path}={value}" for path, value in FIELDS.items()]
    command = [sys.executable, "-m", "launch.simulate", "--config=configs/moonlight.py", *fields, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@pytest.mark.usefixtures("libtpu")
def test_the_table_goes_to_stderr_and_the_result_is_the_last_line(tmp_path):
    run = simulated(
        "--topology=v5e:2x2",
        "--chips=64",
        "--splits=1:3",
        "--sandboxes=50,500",
        "--hours=2",
        "--warm_up_hours=1",
        "--turns_median=5",
        "--turns_p99=20",
        "--prompt_tokens=8",
        "--hung_fraction=0",
        "--config.rl.groups.repository=4",
        "--config.rl.max_staleness=1",
        f"--out={tmp_path}/simulated.json",
    )
    assert run.returncode == 0, run.stderr
    line = run.stdout.splitlines()[-1]
    assert line + "\n" == (tmp_path / "simulated.json").read_text()
    result = json.loads(line)
    assert [row["sandboxes"] for row in result["rows"]] == [50, 500] and result["assumed"]["turns_median"] == 5
    assert result["config"]["groups_per_step"] == 4 and result["rows"][0]["steps"] > 0
    assert "| 500 | 16:48 |" in run.stderr and "500 sandboxes, best split 16:48" in run.stderr


def test_help_and_wrong_numbers(capsys):
    code, out, _ = run_here(capsys, simulate, "--help", processes=hosts.NO_DEVICES)
    assert code == 0 and "--sandbox_start_s: Seconds until a sandbox is ready. Measured here" in out
    assert "--turns_tail: " in out and "(default: 50.0)" in out
    words = "--config=moonlight", "--topology=v5e:2x2", "--turns_median=0"
    code, _, err = run_here(capsys, simulate, *words, processes=hosts.NO_DEVICES)
    assert code == 2 and "--turns_median=0.0 is out of range" in err
