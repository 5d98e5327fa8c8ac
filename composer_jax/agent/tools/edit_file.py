"""The tool that edits one file: replaces a text that occurs once, creates, deletes."""

from composer_jax.agent.patches.file_text import decode_text, encode_text
from composer_jax.agent.patches.replace import replace_once
from composer_jax.agent.tools.browse import read_bytes
from composer_jax.agent.tools.paths import refuse_links, resolve_file, resolve_path
from composer_jax.agent.tools.schema import ToolError
from composer_jax.agent.tools.tool import PATH, Tool, object_schema
from composer_jax.agent.workspace import Workspace
from composer_jax.tasks.patches import PatchError, split_lines


async def edit_file(workspace: Workspace, path: str, old: str = "", new: str = "", delete: bool = False) -> str:
    """Replaces `old` by `new`; without `old`, creates the file; with `delete`, removes it."""
    if delete:
        return _delete(workspace, path, old + new)
    if not old:
        return _create(workspace, path, new)
    if old == new:
        raise ToolError("old and new are the same")
    path = resolve_file(workspace, path)
    try:
        text = decode_text(path, read_bytes(workspace, path))
        after, first = replace_once(path, text, old, new)
        data = encode_text(path, after, text)
    except PatchError as error:
        raise ToolError(str(error)) from error
    workspace.write(path, data)
    last = first + (new.removesuffix("\n").count("\n") if "\n" in after else len(split_lines(new)) - 1)
    return f"edited {path}: lines {first} to {last} are new" if new else f"edited {path}: text at line {first} is gone"


def _create(workspace: Workspace, path: str, new: str) -> str:
    path = resolve_path(workspace, path)
    if not path:
        raise ToolError("the workspace itself is a folder")
    refuse_links(workspace, path)
    if workspace.kind(path) == "file" and workspace.size(path):
        raise ToolError(f"{path} is there; say in old which text of it is to be replaced")
    workspace.write(path, new.encode())
    return f"created {path} with {new.count(chr(10)) + (not new.endswith(chr(10)) and bool(new))} lines"


def _delete(workspace: Workspace, path: str, texts: str) -> str:
    if texts:
        raise ToolError("delete removes the whole file and takes neither old nor new")
    path = resolve_path(workspace, path)
    if workspace.kind(path) != "link":  # a link is deleted itself, not its target
        path = resolve_file(workspace, path or "/workspace")
    workspace.delete(path)
    return f"deleted {path}"


EDIT_FILE = Tool(
    "edit_file",
    "Replace old, which must be in the file exactly once, by new. Without old: create the file with new in it. "
    "With delete: remove the file.",
    object_schema(
        ("path",),
        path=PATH,
        old={"type": "string", "description": "the text to replace, exactly as in the file"},
        new={"type": "string", "description": "what to put there"},
        delete={"type": "boolean", "description": "true removes the file, default false"},
    ),
    edit_file,
)
