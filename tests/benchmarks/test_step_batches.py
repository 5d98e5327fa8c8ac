"""The benchmark of a step's batches: every row arrives, and its numbers are those of the bytes."""

import json
import subprocess
import sys


def test_four_processes_get_a_small_step():
    command = [sys.executable, "-m", "benchmarks.step_batches", "--tokens=16000"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    result = json.loads(output.splitlines()[-1])
    assert result["tokens"] >= 16_000
    assert result["bytes"] == result["tokens"] * (8 * 4 + 60 * 8 * 2)
    assert 0 < result["overhead"] < 0.01
    assert result["compression"]["routes"]["1"][0] > 0.5
