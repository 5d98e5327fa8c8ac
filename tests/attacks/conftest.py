"""Attacks on sandboxes: each must fail, and the host must not notice (fixture `host` checks that at the end)."""

import textwrap
from collections.abc import Callable

import pytest

from tests.sandbox.fixtures import LIMITS, host, pool, run_python, trace

__all__ = ["LIMITS", "attempt", "host", "pool", "run_python", "trace"]

PROGRAM = """
import ctypes, errno, fcntl, glob, mmap, os, platform, pwd, resource, signal, socket, stat, struct, subprocess, sys

libc = ctypes.CDLL(None, use_errno=True)

def checked(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), "refused")
    return result

def syscall(x86_64, aarch64, *arguments):
    return checked(libc.syscall({{"x86_64": x86_64, "aarch64": aarch64}}[platform.machine()], *arguments))

def attack():
{body}

try:
    print("DID", attack())
except OSError as error:
    print(errno.errorcode[error.errno])
"""


@pytest.fixture
def attempt(host, run_python) -> Callable[[str], str]:
    """Run the body of a function in a sandbox: the name of the error that refused it, or "DID" and what it returned.

    That it is exactly the expected error tells an attack that was refused from one that was written wrongly.
    """

    def go(body: str) -> str:
        if "\n" not in body and not body.startswith("raise "):
            body = f"return {body}"
        result = run_python(PROGRAM.format(body=textwrap.indent(textwrap.dedent(body), "    ")))
        assert (result.outcome, result.stderr) == ("ok", ""), result
        return result.stdout.strip()

    return go
