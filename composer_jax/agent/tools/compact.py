"""The compact set of tools, for small models on small workspaces of Python files: literal arguments, short answers."""

from collections.abc import Mapping
from typing import Any

from composer_jax.agent.tools.schema import ToolError
from composer_jax.agent.tools.tool import FINISH_TOOL, Tool, object_schema
from composer_jax.agent.tools.truncate import truncate_end
from composer_jax.agent.workspace import Workspace

MAX_MATCHES = 10  # lines of one grep
TEST_COMMAND = ("python", "run_tests.py")
TEST_TIMEOUT_S = 5.0


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
    # The runner prints one line; a traceback means that the runner itself is broken, and its last line says why.
    return result.stdout.strip() or result.stderr.strip().split("\n")[-1] or f"no output, exit {result.exit_code}"


def _object(**properties: str) -> dict[str, Any]:
    return object_schema(
        tuple(properties), **{name: {"type": "string", "description": text} for name, text in properties.items()}
    )


_PATH = "relative path of a file in the workspace"
TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool("run_tests", "Run the visible tests.", _object(), _run_tests, truncate_end),
        Tool(
            "grep",
            "Find a literal text in the Python files.",
            _object(pattern="the text"),
            _grep,
            truncate_end,
            read_only=True,
        ),
        Tool("read", "Show a file.", _object(path=_PATH), _read, truncate_end, read_only=True),
        Tool(
            "edit",
            "Replace a text that occurs exactly once in a file.",
            _object(path=_PATH, old="the text to replace", new="what to put there"),
            _edit,
            truncate_end,
        ),
        FINISH_TOOL,
    )
}
