"""The tool that runs commands in the persistent shell."""

import shlex

from composer_jax.agent.tools.schema import ToolError
from composer_jax.agent.workspace import Workspace
from composer_jax.sandbox import RunResult

TIMEOUT_S, MAX_TIMEOUT_S = 120, 600
START_S = 10.0  # longest it may take to put a command in the background


async def shell(workspace: Workspace, command: str, timeout: int = TIMEOUT_S, background: bool = False) -> str:
    """What a command says and how it ended; or, in the background, where its output goes."""
    if "\0" in command:
        raise ToolError("command has a zero byte in it, which no command line can hold")
    if background:
        return await _start(workspace, command)
    result, is_new = await workspace.shell(command, timeout)
    return _lost(is_new) + "\n".join(part for part in (_output(result), _ending(result, timeout)) if part)


async def _start(workspace: Workspace, command: str) -> str:
    number = workspace.jobs_started + 1
    log = f'"${{TMPDIR:-/tmp}}/job-{number}.log"'
    # eval: a command that is wrong says so in the log, and cannot end the line it stands in.
    line = f'{{ (eval {shlex.quote(command)}); echo "[exit $?]"; }} >{log} 2>&1 </dev/null & echo $! {log}'
    result, is_new = await workspace.shell(line, START_S)
    if result.outcome != "ok":
        raise ToolError(f"the job was not started: {_output(result) or result.outcome}")
    workspace.jobs_started = number
    process, _, path = result.stdout.strip().partition(" ")
    return f"{_lost(is_new)}job {number} started, process {process}; its output goes to {path}"


def _output(result: RunResult) -> str:
    parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
    if all(parts):
        parts[1] = f"[stderr]\n{parts[1]}"
    return "\n".join(part for part in parts if part)


def _ending(result: RunResult, timeout: int) -> str:
    said = {
        "timeout": f"[stopped: not done after {timeout} s, or out of CPU time]",
        "out_of_memory": "[stopped: out of memory]",
        "output_limit": "[stopped: far too much output]",
    }
    return said.get(result.outcome, f"[exit {result.exit_code}]")


def _lost(is_new: bool) -> str:
    if not is_new:
        return ""
    return "[the shell was lost and a new one started: its folder, variables, jobs and /tmp are as at first]\n"
