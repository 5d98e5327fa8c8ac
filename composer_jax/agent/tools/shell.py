"""The tool that runs commands in the persistent shell."""

import shlex

from composer_jax.agent.tools.schema import ToolError
from composer_jax.agent.tools.tool import Tool, object_schema
from composer_jax.agent.workspace import Workspace
from composer_jax.sandbox import RunResult

TIMEOUT_S, MAX_TIMEOUT_S = 120, 600
START_S = 10.0  # time limit to start a command in the background


async def shell(workspace: Workspace, command: str, timeout: int = TIMEOUT_S, background: bool = False) -> str:
    """The output and the exit status of a command; of one in the background, the path of its output."""
    if "\0" in command:
        raise ToolError("command has a zero byte in it, which no command line can hold")
    if background:
        return await _start(workspace, command)
    result, is_new = await workspace.shell(command, timeout)
    return _new_shell_note(is_new) + "\n".join(part for part in (_output(result), _exit_note(result, timeout)) if part)


async def _start(workspace: Workspace, command: str) -> str:
    number = workspace.jobs_started + 1
    log = f'"${{TMPDIR:-/tmp}}/job-{number}.log"'
    # eval puts syntax errors into the log and keeps them from ending this line.
    line = f'{{ (eval {shlex.quote(command)}); echo "[exit $?]"; }} >{log} 2>&1 </dev/null & echo $! {log}'
    result, is_new = await workspace.shell(line, START_S)
    if result.outcome != "ok":
        raise ToolError(f"the job was not started: {_output(result) or result.outcome}")
    workspace.jobs_started = number
    process, _, path = result.stdout.strip().partition(" ")
    return f"{_new_shell_note(is_new)}job {number} started, process {process}; its output goes to {path}"


def _output(result: RunResult) -> str:
    parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
    if all(parts):
        parts[1] = f"[stderr]\n{parts[1]}"
    return "\n".join(part for part in parts if part)


def _exit_note(result: RunResult, timeout: int) -> str:
    notes = {
        "timeout": f"[stopped: not done after {timeout} s, or out of CPU time]",
        "out_of_memory": "[stopped: out of memory]",
        "output_limit": "[stopped: far too much output]",
    }
    return notes.get(result.outcome, f"[exit {result.exit_code}]")


def _new_shell_note(is_new: bool) -> str:
    if not is_new:
        return ""
    return "[the shell was lost and a new one started: its folder, variables, jobs and /tmp are as at first]\n"


SHELL = Tool(
    "shell",
    "Run a command in a shell whose folder, variables and jobs stay from call to call.",
    object_schema(
        ("command",),
        command={"type": "string", "minLength": 1, "maxLength": 100_000, "description": "for bash"},
        timeout={
            "type": "integer",
            "minimum": 1,
            "maximum": MAX_TIMEOUT_S,
            "description": f"seconds, default {TIMEOUT_S}",
        },
        background={"type": "boolean", "description": "true starts it and does not wait, default false"},
    ),
    shell,
)
