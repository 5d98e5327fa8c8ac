"""A sampler on several processes samples what it samples on one process of eight devices; they end together."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.parallel.test_processes import free_port, run_together
from tests.sampler.serving_process import play

ROOT = Path(__file__).parents[2]
MODULE = "tests.sampler.serving_process"
SECONDS_TO_END = 15
"""Less than JAX needs to notice that a process is gone (100 s)."""


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_sample_what_one_samples(tmp_path, count):
    """Of four processes, the first has no device of the second engine, and the last two none of the first."""
    codes, outputs = run_together(MODULE, "conversations", str(tmp_path / "out.json"), str(count), count=count)
    assert codes == [0] * count, "\n".join(outputs)[-4000:]
    actual, expected = json.loads((tmp_path / "out.json").read_text()), play(first_process=True, count=count)
    assert actual.keys() == expected.keys()
    for name, fields in expected.items():
        for field in ("tokens", "likeliest", "routing"):
            assert actual[name][field] == fields[field], (name, field)
        for field in ("logprobs", "top_logprobs", "prompt_logprobs"):
            for mine, theirs in zip(actual[name][field], fields[field], strict=True):
                np.testing.assert_allclose(mine, theirs, atol=1e-5, err_msg=f"{name} {field}")


@contextlib.contextmanager
def serving_forever(option: str, until: str, count: int = 2):
    """The processes, of which process 0 has printed the line `until`; they are killed at the end."""
    address = f"127.0.0.1:{free_port()}"
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST")}
    with contextlib.ExitStack() as at_end:
        started = []
        for i in range(count):
            process = subprocess.Popen(
                [sys.executable, "-m", MODULE, address, str(i), "forever", option, str(count)],
                cwd=ROOT,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            at_end.callback(process.communicate)
            at_end.callback(process.kill)
            started.append(process)
        assert started[0].stdout is not None
        for line in started[0].stdout:
            if line.strip() == until:
                break
        else:
            pytest.fail("process 0 ended before it served")
        yield started


@pytest.mark.parametrize(
    ("option", "until", "killed"),
    [
        ("idle", "serving", 0),
        pytest.param("idle", "serving", 1, marks=pytest.mark.slow),
        pytest.param("busy", "sampling", 0, marks=pytest.mark.slow),
    ],
)
def test_a_killed_process_ends_the_other_with_a_sentence(option, until, killed):
    with serving_forever(option, until) as started:
        started[killed].send_signal(signal.SIGKILL)
        before = time.monotonic()
        output, _ = started[1 - killed].communicate(timeout=120)
        assert time.monotonic() - before < SECONDS_TO_END
        assert f"prog: process {killed} ended: it was killed, or its machine is gone" in output, output
        assert started[1 - killed].returncode == 1 and "Traceback" not in output
        assert started[killed].wait() == -signal.SIGKILL


@pytest.mark.slow
def test_a_killed_process_ends_three_others():
    """The program fails in all of them; the sentence names the process that was killed, and not another one."""
    with serving_forever("busy", "sampling", count=4) as started:
        started[2].send_signal(signal.SIGKILL)
        before = time.monotonic()
        outputs = {i: started[i].communicate(timeout=120)[0] for i in (0, 1, 3)}
        assert time.monotonic() - before < SECONDS_TO_END
    for i, output in outputs.items():
        assert "prog: process 2 ended: it was killed, or its machine is gone" in output, output
        assert started[i].returncode == 1 and "Traceback" not in output, output


@pytest.mark.slow
def test_an_interrupted_follower_ends_process_0_with_a_sentence():
    """The follower reports what ended it before its connection closes, so nobody takes it for killed."""
    with serving_forever("busy", "sampling") as started:
        started[1].send_signal(signal.SIGINT)
        outputs = [process.communicate(timeout=120)[0] for process in started]
    assert "prog: stopped." in outputs[1] and "it was killed" not in outputs[0]
    # Process 0 prints what it hears first: the follower's report, or the failure at the coordinator.
    reports = ("prog: process 1 ended: it was interrupted", "prog: process 1 ended: stopped.")
    assert any(report in outputs[0] for report in reports), outputs[0]


def test_one_process_does_not_follow(sampler):
    with pytest.raises(RuntimeError, match="process 0 serves"):
        sampler.follow()
