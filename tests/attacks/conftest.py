"""Attacks on sandboxes: each must fail, and the host must not notice (fixture `host` checks that at the end)."""

import ast
import textwrap
from collections.abc import Callable, Mapping

import pytest

from tests.sandbox.fixtures import LIMITS, host, pool, run_python, trace

__all__ = ["LIMITS", "attempt", "attempts", "host", "pool", "run_python", "trace"]

PROGRAM = """
import ctypes, errno, fcntl, glob, mmap, os, platform, pwd, resource, signal, socket, stat, struct, subprocess, sys

libc = ctypes.CDLL(None, use_errno=True)

def checked(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), "refused")
    return result

def syscall(x86_64, aarch64, *arguments):
    return checked(libc.syscall({"x86_64": x86_64, "aarch64": aarch64}[platform.machine()], *arguments))

def answer(attack):
    try:
        return f"DID {attack()}"
    except OSError as error:
        return errno.errorcode[error.errno]
"""


@pytest.fixture
def attempts(host, run_python) -> Callable[[Mapping[str, str]], dict[str, str]]:
    """Runs bodies of functions one after another in one program of a sandbox.

    Returns for each name of a body the name of the error that refused it, or "DID" and what it returned. That it is
    exactly the expected error tells an attack that was refused from one that was written wrongly.
    """

    def go(bodies: Mapping[str, str]) -> dict[str, str]:
        program = PROGRAM
        for body in bodies.values():
            if "\n" not in body and not body.startswith("raise "):
                body = f"return {body}"
            program += (
                f"\ndef attack():\n{textwrap.indent(textwrap.dedent(body), '    ')}\nprint(repr(answer(attack)))\n"
            )
        result = run_python(program)
        assert (result.outcome, result.stderr) == ("ok", ""), result
        return dict(zip(bodies, map(ast.literal_eval, result.stdout.splitlines()), strict=True))

    return go


@pytest.fixture
def attempt(attempts) -> Callable[[str], str]:
    """Runs one body in a sandbox of its own."""
    return lambda body: attempts({"": body})[""].strip()
