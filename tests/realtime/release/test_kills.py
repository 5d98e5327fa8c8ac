"""kill -9 at every write of a cycle of releases: it goes on, no state is skipped, no session is lost or doubled."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
from pathlib import Path
from benchmarks.traffic_kills import kill_everywhere
print(json.dumps(kill_everywhere(Path(sys.argv[1]), every=int(sys.argv[2]))))
"""


@pytest.mark.parametrize("every", [30, pytest.param(7, marks=pytest.mark.slow)])
def test_a_cycle_goes_on_after_a_kill_at_any_write(tmp_path, every):
    """In a process of its own: it forks, which threads of JAX do not survive. The benchmark kills at all writes."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(every)]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert result["problems"] == []
    assert result["points"] * every > 100 and result["kills"] >= 2 * result["points"] - 3
