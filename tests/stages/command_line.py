"""The entry points as a user starts them: in a process of their own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def pipeline_environment() -> dict[str, str]:
    """Returns this process's environment, in which programs are optimised as little as pays for a whole pipeline.

    A pipeline samples more than it compiles: configs/tiny.py:smoke took 151 s with LLVM's level 1, 228 s with the level
    0 of tests/conftest.py and 157 s with level 2. The notebooks run the same programs, so they use the same flags.
    """
    flags = os.environ["XLA_FLAGS"]
    assert "--xla_backend_optimization_level=0" in flags
    return os.environ | {"XLA_FLAGS": flags.replace("optimization_level=0", "optimization_level=1")}


def start(workdir: Path, *arguments: str, cache: Path, entry: str = "launch.pipeline") -> subprocess.Popen:
    """Starts an entry point on a run folder. Compiled programs are kept in `cache` unless the tests have their own."""
    # A user has no NPROC for eight devices.
    env = {"JAX_COMPILATION_CACHE_DIR": str(cache)} | {k: v for k, v in pipeline_environment().items() if k != "NPROC"}
    env["PYTHONFAULTHANDLER"] = "1"  # for stop()
    command = [sys.executable, "-m", entry, f"--workdir={workdir}", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen, timeout: float = 900) -> subprocess.CompletedProcess:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the process did not end in {timeout} s:\n{stop(process)}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def kill_when(process: subprocess.Popen, reached: Callable[[], bool], timeout: float = 900) -> None:
    """SIGKILL as soon as `reached` is true; a process that ends by itself before that is a failure."""
    deadline = time.monotonic() + timeout
    while not reached():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"the process did not get there in {timeout} s:\n{stop(process)}"
        time.sleep(0.02)
    process.kill()
    process.communicate()


def stop(process: subprocess.Popen) -> str:
    """Ends a process that is stuck; returns what it printed and where each of its threads was."""
    process.send_signal(signal.SIGABRT)
    out, err = process.communicate(timeout=30)
    return out + err
