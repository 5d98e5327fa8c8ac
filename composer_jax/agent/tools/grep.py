"""The tool that finds lines by a regular expression; it runs in the sandbox, where a costly pattern does no harm."""

import json
from pathlib import Path

from composer_jax.agent.tools.paths import resolve_existing, resolve_path
from composer_jax.agent.tools.schema import ToolError
from composer_jax.agent.tools.tool import UNDER, Tool, object_schema
from composer_jax.agent.workspace import Workspace

TIMEOUT_S = 20.0
_FOLDER = Path(__file__).parent
PROGRAM = "".join((_FOLDER / name).read_text(encoding="utf-8") for name in ("glob_pattern.py", "grep_program.py"))
COMMAND = ("python", "-I", "-S", "-W", "ignore", "-c", PROGRAM)


async def grep(
    workspace: Workspace, pattern: str, path: str = "", glob: str = "", ignore_case: bool = False, context: int = 0
) -> str:
    """The matching lines with their paths and numbers."""
    folder = resolve_existing(workspace, path, "file", "folder")
    for name, text in (("pattern", pattern), ("glob", glob)):
        if "\0" in text:
            raise ToolError(f"{name} has a zero byte in it, which no text file has")
    request = {
        "pattern": pattern,
        "path": folder,
        "glob": resolve_path(workspace, glob) if "/" in glob else glob,
        "ignore_case": ignore_case,
        "context": context,
    }
    result = await workspace.run([*COMMAND, json.dumps(request)], TIMEOUT_S)
    if result.outcome == "timeout":
        raise ToolError(
            f"the search was stopped after {TIMEOUT_S:g} s; use a simpler pattern, or search in fewer files"
        )
    if result.outcome == "nonzero" and result.exit_code == 2:
        raise ToolError(result.stderr.strip())
    if result.exit_code in (126, 127) and not result.stdout:
        raise ToolError("there is no Python to search with in the image of this task; use the shell's grep")
    if result.outcome not in ("ok", "nonzero") or not result.stdout:
        raise ToolError(f"the search failed ({result.outcome}): {result.stderr.strip()[-300:]}")
    return result.stdout.rstrip("\n")


GREP = Tool(
    "grep",
    "Find lines by a regular expression in text files.",
    object_schema(
        ("pattern",),
        pattern={"type": "string", "minLength": 1, "maxLength": 1000, "description": "a regular expression"},
        path=UNDER,
        glob={"type": "string", "maxLength": 300, "description": "only in files that match, such as *.py"},
        ignore_case={"type": "boolean", "description": "default false"},
        context={"type": "integer", "minimum": 0, "maximum": 20, "description": "lines shown around, default 0"},
    ),
    grep,
    read_only=True,
)
