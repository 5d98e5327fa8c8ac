"""The tool that edits one file: replaces a text that occurs once, creates, deletes."""

from composer_jax.agent import similar_lines
from composer_jax.agent.tools.browse import read_bytes
from composer_jax.agent.tools.paths import refuse_links, resolve_file, resolve_path
from composer_jax.agent.tools.schema import ToolError
from composer_jax.agent.tools.tool import PATH, Tool, object_schema
from composer_jax.agent.workspace import Workspace


async def edit_file(workspace: Workspace, path: str, old: str = "", new: str = "", delete: bool = False) -> str:
    """Replaces `old` by `new`; without `old`, creates the file; with `delete`, removes it."""
    if delete:
        return _delete(workspace, path, old + new)
    if not old:
        return _create(workspace, path, new)
    if old == new:
        raise ToolError("old and new are the same")
    path = resolve_file(workspace, path)
    text = read_text(workspace, path)
    if has_crlf(text, old + new):
        old, new = old.replace("\n", "\r\n"), new.replace("\n", "\r\n")
    count = text.count(old)
    if count > 1:
        where = similar_lines.line_numbers(text, old)
        raise ToolError(f"old is {count} times in {path}, at lines {where}; make it longer, so that it is there once")
    if not count:
        raise ToolError(f"old is not in {path}{similar_lines.describe_similar_lines(text, old)}")
    workspace.write(path, text.replace(old, new).encode())
    first = text.count("\n", 0, text.find(old)) + 1
    last = first + new.removesuffix("\n").count("\n")
    return f"edited {path}: lines {first} to {last} are new" if new else f"edited {path}: text at line {first} is gone"


def read_text(workspace: Workspace, path: str) -> str:
    """The text of a file. Raises ToolError if the file is not UTF-8."""
    try:
        return read_bytes(workspace, path).decode()
    except UnicodeDecodeError as error:
        raise ToolError(f"{path} is not UTF-8 text") from error


def has_crlf(text: str, edit: str) -> bool:
    """Whether all lines of a file end with CR LF and the edit has no CR.

    The edit then means CR LF as well, because read_file does not show CR.
    """
    ends = text.count("\n")
    return ends > 0 and text.count("\r\n") == ends and "\r" not in edit


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
