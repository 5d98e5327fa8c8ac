"""The tools: a name, a JSON schema, and what a call does to the workspace.

Whatever a model asks for is answered: a wrong argument, a missing file, an unknown tool are observations that
start with "ERROR", never exceptions. Observations are short, because every character of them is context.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_jax.agent.workspace import Workspace
from composer_jax.data.chat import Malformed, ToolCall
from composer_jax.errors import UserError

MAX_CHARACTERS = 2000  # of one observation
MAX_MATCHES = 10  # lines of one grep
TEST_COMMAND = ("python", "run_tests.py")
TEST_TIMEOUT_S = 5.0
FINISH = "finish"


class ToolError(Exception):
    """A call that cannot be carried out; its text becomes the observation."""


@dataclass(frozen=True)
class Tool:
    """A tool. parameters: JSON schema of its arguments. call: given the workspace and the arguments by
    name."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    call: Callable[..., Awaitable[str]]

    def check(self, arguments: Any) -> dict[str, str]:
        """The arguments, if they are exactly the strings that the schema names. Raises ToolError
        otherwise."""
        if not isinstance(arguments, dict):
            raise ToolError(f"{self.name} takes an object")
        wanted = self.parameters["properties"]
        for name in wanted:
            if name not in arguments:
                raise ToolError(f"{self.name} needs {name}")
        for name, value in arguments.items():
            if name not in wanted:
                raise ToolError(f"{self.name} takes no {name}")
            if not isinstance(value, str):
                raise ToolError(f"{name} must be a string")
        return arguments


async def _read(workspace: Workspace, path: str) -> str:
    return _file(workspace, path).decode(errors="replace")


async def _grep(workspace: Workspace, pattern: str) -> str:
    if not pattern:
        raise ToolError("pattern is empty")
    matches = []
    for path, data in sorted(workspace.files.items()):
        if path.endswith(".py"):
            lines = data.decode(errors="replace").splitlines()
            matches += [f"{path}:{n} {line.strip()}" for n, line in enumerate(lines, 1) if pattern in line]
    if not matches:
        return "no match"
    more = [f"[{len(matches) - MAX_MATCHES} more]"] if len(matches) > MAX_MATCHES else []
    return "\n".join(matches[:MAX_MATCHES] + more)


async def _edit(workspace: Workspace, path: str, old: str, new: str) -> str:
    if not old:
        raise ToolError("old is empty")
    if old == new:
        raise ToolError("old and new are the same")
    try:
        text = _file(workspace, path).decode()
    except UnicodeDecodeError as error:
        raise ToolError(f"{path} is not text") from error
    count = text.count(old)
    if count != 1:
        raise ToolError(f"old is {count} times in {path}" if count else f"old is not in {path}")
    workspace.write(path, text.replace(old, new).encode())
    return "ok"


def _file(workspace: Workspace, path: str) -> bytes:
    if path not in workspace.files:
        raise ToolError(f"no such file {path}")
    return workspace.files[path]


async def _run_tests(workspace: Workspace) -> str:
    result = await workspace.run(TEST_COMMAND, TEST_TIMEOUT_S)
    if result.outcome not in ("ok", "nonzero"):
        return f"FAIL {result.outcome}"
    # The runner prints one line; a traceback means that the runner itself is broken: its last line says how.
    return result.stdout.strip() or result.stderr.strip().split("\n")[-1] or f"no output, exit {result.exit_code}"


async def _finish(workspace: Workspace) -> str:
    return "done"


def _object(**properties: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"type": "string", "description": text} for name, text in properties.items()},
        "required": list(properties),
        "additionalProperties": False,
    }


_PATH = "relative path of a file in the workspace"
TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool("run_tests", "Run the visible tests.", _object(), _run_tests),
        Tool("grep", "Find a literal text in the Python files.", _object(pattern="the text"), _grep),
        Tool("read", "Show a file.", _object(path=_PATH), _read),
        Tool(
            "edit",
            "Replace a text that occurs exactly once in a file.",
            _object(path=_PATH, old="the text to replace", new="what to put there"),
            _edit,
        ),
        Tool(FINISH, "Say that the work is done.", _object(), _finish),
    )
}


def select(names: Sequence[str]) -> dict[str, Tool]:
    """The tools of a task. Raises UserError for a name that no tool has."""
    for name in names:
        if name not in TOOLS:
            raise UserError(f"a task asks for the tool {name!r}; the tools are {', '.join(TOOLS)}")
    return {name: TOOLS[name] for name in names}


def is_finish(call: ToolCall | Malformed, tools: Mapping[str, Tool]) -> bool:
    """Whether the call is a well-formed finish."""
    return isinstance(call, ToolCall) and call.name == FINISH and FINISH in tools and call.arguments == {}


async def answer(call: ToolCall | Malformed, tools: Mapping[str, Tool], workspace: Workspace) -> str:
    """The observation of one call. Raises only SandboxDied."""
    try:
        if isinstance(call, Malformed):
            raise ToolError(call.reason)
        if call.name not in tools:
            raise ToolError(f"no tool {call.name}")
        tool = tools[call.name]
        return shortened(await tool.call(workspace, **tool.check(call.arguments)))
    except ToolError as error:
        return shortened(f"ERROR {error}")


def shortened(text: str) -> str:
    """The text, or its beginning and how much of it was dropped."""
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}\n[{len(text) - MAX_CHARACTERS} characters dropped]"
