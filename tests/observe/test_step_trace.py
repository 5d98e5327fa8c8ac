"""Traces of steps by JAX's real profiler, in a process of its own."""

import gzip
import json
import subprocess
import sys

import jax
import pytest

from composer_jax.observe.step_trace import StepTrace

TRACED = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from composer_jax.observe.step_trace import StepTrace

def function_of(step):
    def function(x):
        return step * x
    function.__name__ = f"step{step}"
    return jax.jit(function)

with StepTrace(Path(sys.argv[1]), range(2, 4)) as trace:
    for step in range(1, 6):
        trace.begin(step)
        function_of(step)(jnp.ones(3)).block_until_ready()
        if trace.ends(step):
            trace.end()
            assert trace.is_written and step == 3
"""


def test_a_trace_has_the_calls_of_its_steps(tmp_path):
    done = subprocess.run([sys.executable, "-c", TRACED, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.rglob("*.trace.json.gz")
    names = {str(event.get("name")) for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert {name for name in names if name.startswith("PjitFunction(step")} == {
        f"PjitFunction(step{n})" for n in (2, 3)
    }
    assert list(tmp_path.rglob("*.xplane.pb"))


@pytest.fixture
def full_disk(monkeypatch):
    """A profiler that cannot write, in place of JAX's."""

    def stop_trace():
        raise OSError("No space left on device")

    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", stop_trace)


def test_a_trace_that_cannot_be_written_does_not_hide_the_error_of_the_run(full_disk, tmp_path, caplog):
    with pytest.raises(ZeroDivisionError), StepTrace(tmp_path, range(1, 3)) as trace:
        trace.begin(1)
        raise ZeroDivisionError
    assert f"The trace in {tmp_path} is not written: No space left on device" in caplog.text
    with pytest.raises(OSError, match="No space"), StepTrace(tmp_path, range(1, 3)) as trace:
        trace.begin(1)


LOADS_LIBTPU = """
from jax.experimental import topologies
from composer_jax.errors import UserError
from composer_jax.observe.step_trace import ProfileConfig, require_profiler

require_profiler(ProfileConfig("1:2"))
topologies.get_topology_desc("v5e:2x2", platform="tpu")
require_profiler(ProfileConfig(""))
require_profiler(ProfileConfig("1:2"))
"""


@pytest.mark.usefixtures("libtpu")
def test_a_process_with_libtpu_and_no_tpu_is_told_that_it_cannot_be_traced():
    done = subprocess.run([sys.executable, "-c", LOADS_LIBTPU], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "line 9" in done.stderr
    assert "config.profile.steps=1:2: this process has loaded libtpu and has no TPU" in done.stderr
    assert "set JAX_PLATFORMS=cpu" in done.stderr
