"""The table of the repository set of tools, for capable models on real repositories."""

from collections.abc import Mapping

from composer_jax.agent.todos import STATUSES
from composer_jax.agent.tools import browse, shell
from composer_jax.agent.tools.apply_patch import apply_patch
from composer_jax.agent.tools.edit_file import edit_file
from composer_jax.agent.tools.grep import grep
from composer_jax.agent.tools.semantic_search import semantic_search
from composer_jax.agent.tools.todo_write import todo_write
from composer_jax.agent.tools.tool import FINISH, Tool, object_schema
from composer_jax.agent.workspace import Workspace


async def _finish(workspace: Workspace) -> str:
    return "done"


_PATH = {"type": "string", "description": "path relative to the workspace"}
_UNDER = {"type": "string", "description": "only in this file or folder"}
_ITEM = object_schema(
    ("content", "status"),
    content={"type": "string", "minLength": 1, "maxLength": 500},
    status={"type": "string", "enum": list(STATUSES)},
)
_TOOLS = (
    Tool(
        "read_file",
        f"Show a file with line numbers, or a part of it; at most {browse.MAX_LINES} lines at once.",
        object_schema(
            ("path",),
            path=_PATH,
            start={"type": "integer", "minimum": 1, "description": "first line, default 1"},
            end={"type": "integer", "minimum": 1, "description": "last line, default the last of the file"},
        ),
        browse.read_file,
        read_only=True,
    ),
    Tool(
        "list_dir",
        "List what is in a folder.",
        object_schema(
            path={"type": "string", "description": "the folder, default the workspace"},
            depth={"type": "integer", "minimum": 1, "maximum": 10, "description": "levels of folders, default 1"},
        ),
        browse.list_dir,
        read_only=True,
    ),
    Tool(
        "glob",
        "Find files by a pattern with *, ?, [...], {a,b} and ** for any folders; without a slash it is matched with "
        "the names of files in all folders.",
        object_schema(
            ("pattern",),
            pattern={"type": "string", "minLength": 1, "maxLength": 300, "description": "such as src/**/*_test.py"},
        ),
        browse.glob,
        read_only=True,
    ),
    Tool(
        "grep",
        "Find lines by a regular expression in text files.",
        object_schema(
            ("pattern",),
            pattern={"type": "string", "minLength": 1, "maxLength": 1000, "description": "a regular expression"},
            path=_UNDER,
            glob={"type": "string", "maxLength": 300, "description": "only in files that match, such as *.py"},
            ignore_case={"type": "boolean", "description": "default false"},
            context={"type": "integer", "minimum": 0, "maximum": 20, "description": "lines shown around, default 0"},
        ),
        grep,
        read_only=True,
    ),
    Tool(
        "semantic_search",
        "Find the functions and passages that a question or some words are about.",
        object_schema(
            ("query",),
            query={"type": "string", "minLength": 1, "maxLength": 1000, "description": "what to look for, in words"},
            path=_UNDER,
        ),
        semantic_search,
        read_only=True,
    ),
    Tool(
        "edit_file",
        "Replace old, which must be in the file exactly once, by new. Without old: create the file with new in it. "
        "With delete: remove the file.",
        object_schema(
            ("path",),
            path=_PATH,
            old={"type": "string", "description": "the text to replace, exactly as in the file"},
            new={"type": "string", "description": "what to put there"},
            delete={"type": "boolean", "description": "true removes the file, default false"},
        ),
        edit_file,
    ),
    Tool(
        "apply_patch",
        "Apply a unified diff, or a patch from *** Begin Patch to *** End Patch, to any number of files: all of it or "
        "nothing.",
        object_schema(("patch",), patch={"type": "string", "maxLength": 1 << 20, "description": "the patch"}),
        apply_patch,
    ),
    Tool(
        "shell",
        "Run a command in a shell whose folder, variables and jobs stay from call to call.",
        object_schema(
            ("command",),
            command={"type": "string", "minLength": 1, "maxLength": 100_000, "description": "for bash"},
            timeout={
                "type": "integer",
                "minimum": 1,
                "maximum": shell.MAX_TIMEOUT_S,
                "description": f"seconds, default {shell.TIMEOUT_S}",
            },
            background={"type": "boolean", "description": "true starts it and does not wait, default false"},
        ),
        shell.shell,
    ),
    Tool(
        "todo_write",
        "Write down the plan: all items, in place of those of before.",
        object_schema(
            ("items",),
            items={"type": "array", "maxItems": 50, "items": _ITEM, "description": "the items of the plan"},
        ),
        todo_write,
    ),
    Tool(FINISH, "Say that the work is done.", object_schema(), _finish),
)
TOOLS: Mapping[str, Tool] = {tool.name: tool for tool in _TOOLS}
