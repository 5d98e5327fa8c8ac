"""The entry points as a user starts them: in a process of their own."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(workdir: Path, *arguments: str, cache: Path, entry: str = "launch.pipeline") -> subprocess.Popen:
    """Starts an entry point on a run folder. Compiled programs are kept in `cache` unless the tests have their own."""
    # A user has no NPROC for eight devices. The XLA_FLAGS of tests/conftest.py stay: the notebooks run the same
    # programs with them, so that each program is compiled once, and quickly.
    env = {"JAX_COMPILATION_CACHE_DIR": str(cache)} | {k: v for k, v in os.environ.items() if k != "NPROC"}
    command = [sys.executable, "-m", entry, f"--workdir={workdir}", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen, timeout: float = 900) -> subprocess.CompletedProcess:
    out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def kill_when(process: subprocess.Popen, reached: Callable[[], bool], timeout: float = 900) -> None:
    """SIGKILL as soon as `reached` is true; a process that ends by itself before that is a failure."""
    deadline = time.monotonic() + timeout
    while not reached():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "the run did not get there in time"
        time.sleep(0.02)
    process.kill()
    process.communicate()
