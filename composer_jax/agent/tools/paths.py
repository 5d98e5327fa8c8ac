"""The paths that a model writes, as the workspace knows them."""

from composer_jax.agent.tools.schema import ToolError
from composer_jax.agent.workspace import Workspace

MAX_DEPTH = 60  # folders within folders; sandboxes go a little further
MAX_NAME, MAX_PATH = 255, 4000  # bytes that a kernel takes


def resolve_path(workspace: Workspace, path: str) -> str:
    """A path relative to the workspace, "" for the workspace itself. Raises ToolError for one that leads elsewhere."""
    rest = path
    for root in workspace.roots:
        if path == root or path.startswith(f"{root}/"):
            rest = path[len(root) :].lstrip("/")
    if rest.startswith("/"):
        raise ToolError(
            f"{_shown(path)} is outside of the workspace; paths are relative to it, or below {workspace.roots[0]}"
        )
    parts = [part for part in rest.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ToolError(f"{_shown(path)} has '..' in it; paths are relative to the workspace, without '..'")
    if "\0" in rest:
        raise ToolError(f"{_shown(path)!r} is not a file name")
    if len(parts) > MAX_DEPTH or len(rest.encode()) > MAX_PATH or any(len(p.encode()) > MAX_NAME for p in parts):
        raise ToolError(f"{_shown(path)} is longer than a path may be")
    return "/".join(parts)


def resolve_file(workspace: Workspace, path: str) -> str:
    """The relative path of a file that is there. Raises ToolError if it is not, saying what is."""
    found = resolve_path(workspace, path)
    kind = workspace.kind(found) if found else "folder"
    if kind == "file":
        return found
    if kind == "folder":
        raise ToolError(f"{found or '.'} is a folder")
    refuse_links(workspace, found)
    raise ToolError(f"there is no file {found}{_near(workspace, found)}")


def refuse_links(workspace: Workspace, path: str) -> None:
    """Raises ToolError if a path is a link or leads through one."""
    parts = path.split("/")
    for length in range(1, len(parts) + 1):
        part = "/".join(parts[:length])
        if workspace.kind(part) == "link":
            raise ToolError(f"{part} is a symbolic link to {_shown(workspace.target(part))}, which is not followed")


def _near(workspace: Workspace, path: str) -> str:
    """Where a file of the same name is."""
    name = path.rpartition("/")[2]
    found = [other for other in workspace.paths("file") if other.rpartition("/")[2] == name]
    return f"; there is {', '.join(found[:3])}" if found else ""


def _shown(path: str) -> str:
    return path if len(path) <= 100 else f"{path[:100]}..."
