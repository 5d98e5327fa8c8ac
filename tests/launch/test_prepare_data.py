"""launch.prepare_data as a user runs it: stopped by Ctrl-C, continued, and refused with a sentence."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.data.prepare.folders import code, make_tokenizer, write_files

ROOT = Path(__file__).parents[2]


def command(tmp_path, out, *arguments):
    flags = [f"--source={tmp_path}/s", f"--tokenizer={tmp_path}/t", f"--out={tmp_path / out}", "--workers=2"]
    return [sys.executable, "-m", "launch.prepare_data", *flags, "--unit_bytes=60000", *arguments]


def run(tmp_path, out, *arguments):
    return subprocess.run(command(tmp_path, out, *arguments), cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_ctrl_c_and_the_same_command_again(tmp_path):
    make_tokenizer(tmp_path / "t")
    write_files(tmp_path / "s", {f"m{i}.py": code(i, 500) for i in range(200)})
    whole = run(tmp_path, "whole")
    assert whole.returncode == 0 and "train: " in whole.stdout, whole.stderr

    process = subprocess.Popen(
        command(tmp_path, "stopped"), cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not list((tmp_path / "stopped").glob("train-*.array_record")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal sends: to all processes of the command
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "Traceback" not in stderr, stderr
    assert not (tmp_path / "stopped/index.json").exists()
    assert run(tmp_path, "stopped").returncode == 0
    files = [
        {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "whole", tmp_path / "stopped")
    ]
    assert files[0] == files[1]

    refused = run(tmp_path, "whole", "--languages=python,cobol")
    assert refused.returncode == 2 and "languages=cobol is unknown; use some of python" in refused.stderr
    other = run(tmp_path, "whole", "--near_duplicates=0.5")
    assert other.returncode == 2 and "was prepared with near_duplicates=0.8, not 0.5" in other.stderr
