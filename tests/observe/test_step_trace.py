"""Traces of steps by JAX's real profiler, in a process of its own."""

import gzip
import json
import subprocess
import sys

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
