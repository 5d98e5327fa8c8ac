"""Fixtures of the tests of the landlock backend: a pool, the pids that no command may reach, and attacks."""

import os
import textwrap

import pytest

from composer_jax.sandbox import LocalSandboxPool
from composer_jax.sandbox.inside import processes
from tests.sandbox.fixtures import LIMITS


@pytest.fixture(scope="module")
def landlock_pool():
    pool = LocalSandboxPool(LIMITS, size=4, backend="landlock")
    yield pool
    pool.kill()


def protected_pids(pool: LocalSandboxPool) -> list[int]:
    """Pids that no command may reach: this process, the launcher, zygote, supervisors and workers."""
    launcher = pool.launcher_pid
    return [os.getpid(), launcher, *processes.descendants(launcher)]


ATTEMPT = """
import ctypes, errno, os, signal, socket, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(what, call):
    try: result = call()
    except (OSError, subprocess.SubprocessError): return
    print("DID", what, result)
def fails(what, *arguments):
    if libc.syscall(*arguments) != -1: print("DID", what)
def descriptor_of(pid):
    try: return os.pidfd_open(pid)
    except ProcessLookupError: return -1  # the sandbox of the test before has ended now
"""


@pytest.fixture
def attack(run_python):
    """Runs a program that must exit with 0 and print nothing."""

    def run(code: str, files: dict[str, str] | None = None) -> None:
        result = run_python(ATTEMPT + textwrap.dedent(code), files)
        assert (result.outcome, result.stdout, result.stderr) == ("ok", "", ""), result

    return run
