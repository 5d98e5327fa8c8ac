"""How a command ended, and the commands that no sandbox can run."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["ok", "nonzero", "timeout", "out_of_memory", "output_limit"]


@dataclass(frozen=True)
class RunResult:
    """How a command ended. Long output is truncated: `stdout` and `stderr` then hold its head and its tail."""

    outcome: Outcome
    exit_code: int  # 128 + N for signal N; 124 timeout, 137 out of memory, 153 output limit
    stdout: str
    stderr: str
    seconds: float  # wall clock, measured inside
    truncated_bytes: int  # bytes of stdout and stderr that were dropped


def reject_argv(argv: Sequence[str]) -> RunResult | None:
    """The result of an argument list that cannot be executed (empty, or with a zero byte); None for any other."""
    if argv and not any("\0" in word for word in argv):
        return None
    return RunResult("nonzero", 126, "", "no command, or one with a zero byte in it\n", 0.0, 0)


def reject_shell_command(command: str) -> RunResult | None:
    """The result of a text that cannot be sent to a shell; None for any other."""
    try:
        if b"\0" not in os.fsencode(command):
            return None
    except UnicodeEncodeError:  # a surrogate that stands for no byte
        pass
    return RunResult("nonzero", 126, "", "a command with a zero byte or half of a surrogate pair in it\n", 0.0, 0)
