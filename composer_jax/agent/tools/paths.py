"""Paths of tool arguments, resolved to paths of the workspace."""

from composer_jax.agent.base_folder import Kind
from composer_jax.agent.tools.schema import ToolError
from composer_jax.agent.workspace import Workspace

MAX_DEPTH = 60  # nested folders; sandboxes allow a few more
MAX_NAME, MAX_PATH = 255, 4000  # bytes, as in the kernel


def resolve_path(workspace: Workspace, path: str) -> str:
    """The path relative to the workspace, "" for the workspace itself. Raises ToolError for one outside of it."""
    rest = path
    for root in workspace.roots:
        if path == root or path.startswith(f"{root}/"):
            rest = path[len(root) :].lstrip("/")
    if rest.startswith("/"):
        raise ToolError(
            f"{_abbreviate(path)} is outside of the workspace; paths are relative to it, or below {workspace.roots[0]}"
        )
    parts = [part for part in rest.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ToolError(f"{_abbreviate(path)} has '..' in it; paths are relative to the workspace, without '..'")
    if "\0" in rest:
        raise ToolError(f"{_abbreviate(path)!r} is not a file name")
    if len(parts) > MAX_DEPTH or len(rest.encode()) > MAX_PATH or any(len(p.encode()) > MAX_NAME for p in parts):
        raise ToolError(f"{_abbreviate(path)} is longer than a path may be")
    return "/".join(parts)


def resolve_existing(workspace: Workspace, path: str, *kinds: Kind) -> str:
    """As `resolve_path`, of an entry of one of these kinds or the workspace itself. Raises ToolError for others."""
    resolved = resolve_path(workspace, path)
    if resolved and workspace.kind(resolved) not in kinds:
        refuse_links(workspace, resolved)
        raise ToolError(f"there is no {' or '.join(kinds)} {resolved}")
    return resolved


def resolve_file(workspace: Workspace, path: str) -> str:
    """The relative path of an existing file. Raises ToolError for anything else."""
    resolved = resolve_path(workspace, path)
    kind = workspace.kind(resolved) if resolved else "folder"
    if kind == "file":
        return resolved
    if kind == "folder":
        raise ToolError(f"{resolved or '.'} is a folder")
    refuse_links(workspace, resolved)
    raise ToolError(f"there is no file {resolved}{_same_name(workspace, resolved)}")


def refuse_links(workspace: Workspace, path: str) -> None:
    """Raises ToolError if a path or a folder above it is a link."""
    parts = path.split("/")
    for length in range(1, len(parts) + 1):
        part = "/".join(parts[:length])
        if workspace.kind(part) == "link":
            raise ToolError(
                f"{part} is a symbolic link to {_abbreviate(workspace.target(part))}, which is not followed"
            )


def _same_name(workspace: Workspace, path: str) -> str:
    """A clause on files of the same name in other folders; "" if there are none."""
    name = path.rpartition("/")[2]
    others = [other for other in workspace.paths("file") if other.rpartition("/")[2] == name]
    return f"; there is {', '.join(others[:3])}" if others else ""


def _abbreviate(path: str) -> str:
    return path if len(path) <= 100 else f"{path[:100]}..."
