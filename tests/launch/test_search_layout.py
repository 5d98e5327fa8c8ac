"""launch.search_layout as a user runs it, for a small network, without TPUs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch import hosts, search_layout
from tests.launch.in_process import run_here
from tests.scale.configuration import FIELDS

ROOT = Path(__file__).parents[2]


def searched(*arguments: str) -> subprocess.CompletedProcess:
    fields = [f"--config.{path}={value}" for path, value in FIELDS.items()]
    command = [sys.executable, "-m", "launch.search_layout", "--config=configs/moonlight.py", *fields, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)


@pytest.mark.slow
@pytest.mark.usefixtures("libtpu")
def test_the_best_layout_is_compiled_and_the_last_line_is_the_result(tmp_path):
    run = searched("--topology=v5e:2x2", "--traces=1", "--compiles=1", f"--out={tmp_path}/layouts.json")
    assert run.returncode == 0, run.stderr
    line = run.stdout.splitlines()[-1]
    assert line + "\n" == (tmp_path / "layouts.json").read_text()
    result = json.loads(line)
    best = result["best"]
    assert best["fits"] is True and 0 < best["compiled_bytes"] < result["limit"]
    assert best["seconds_per_token"] <= result["own"]["seconds_per_token"]
    assert "\nbest: --config.mesh.replica=" in run.stderr and ", fits |" in run.stderr and "ETA" not in line


BAD = {
    "": "--topology is missing",
    "--topology=v5e:2x2 --stage=rl": "--stage=rl has no layout to search; the stages are pretrain, sft.",
    "--topology=v5e:2x2 --batch_sizes=8,many": "--batch_sizes=8,many are not whole numbers",
    "--topology=v5e:2x2 --overlap=most": "--overlap=most is unknown; use no_overlap, weight_gathers_overlap",
}


@pytest.mark.parametrize(("words", "sentence"), BAD.items())
def test_bad_input_is_one_sentence(capsys, words, sentence):
    code, _, err = run_here(capsys, search_layout, "--config=moonlight", *words.split(), processes=hosts.NO_DEVICES)
    assert code == 2 and sentence in err
