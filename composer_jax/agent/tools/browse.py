"""Tools that read without a sandbox: a file with line numbers, a folder, paths by pattern."""

from composer_jax.agent.base_folder import is_vcs_path
from composer_jax.agent.patches.file_text import BOM, shown_text
from composer_jax.agent.tools import glob_pattern
from composer_jax.agent.tools.paths import resolve_existing, resolve_file, resolve_path
from composer_jax.agent.tools.schema import ToolError
from composer_jax.agent.tools.tool import PATH, Tool, object_schema
from composer_jax.agent.workspace import Workspace

MAX_BYTES = 10 << 20  # of a file to show or edit
MAX_LINES = 1000  # of one read_file
MAX_LINE = 500  # characters of a shown line
MAX_LISTED = 300  # paths of one list_dir or glob
BINARY = 8192  # bytes; a zero byte in them marks a binary file


async def read_file(workspace: Workspace, path: str, start: int = 1, end: int | None = None) -> str:
    """The numbered lines start..end of a file."""
    path = resolve_file(workspace, path)
    if end is not None and end < start:
        raise ToolError(f"end {end} is before start {start}")
    data = read_bytes(workspace, path)
    if b"\0" in data[:BINARY]:
        raise ToolError(f"{path} is a binary file of {len(data)} bytes")
    if not data:
        return f"{path} is empty"
    text = shown_text(data.decode(errors="surrogateescape")).removeprefix(BOM)
    lines = (text if "\n" in text else text.replace("\r", "\n")).split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    if start > len(lines):
        raise ToolError(f"{path} has {len(lines)} lines, so there is no line {start}")
    last = min(len(lines) if end is None else end, len(lines), start + MAX_LINES - 1)
    numbered = [f"{number:6}\t{_cut(lines[number - 1])}" for number in range(start, last + 1)]
    part = "" if (start, last) == (1, len(lines)) else f", shown are {start} to {last}"
    return "\n".join([*numbered, f"[{path} has {len(lines)} lines{part}]"])


async def list_dir(workspace: Workspace, path: str = "", depth: int = 1) -> str:
    """The entries of a folder; folders end with a slash, links show their targets."""
    folder = resolve_existing(workspace, path, "folder")
    prefix = f"{folder}/" if folder else ""
    entries = [
        f"{other[len(prefix) :]}{_suffix(workspace, other)}"
        for other in workspace.paths("file", "link", "folder")
        if other.startswith(prefix)
        and other.count("/") - prefix.count("/") < depth
        and not is_vcs_path(other[len(prefix) :].rpartition("/")[0])
    ]
    return _limit_paths(entries) or f"{folder or '.'} is empty"


async def glob(workspace: Workspace, pattern: str) -> str:
    """The paths of files and links that match, in alphabetical order."""
    try:
        matches = glob_pattern.compile_glob(resolve_path(workspace, pattern) if "/" in pattern else pattern)
    except ValueError as error:
        raise ToolError(str(error)) from error
    paths = [path for path in workspace.paths("file", "link") if matches(path)]
    return _limit_paths([path for path in paths if ".git" in pattern or not is_vcs_path(path)]) or "no match"


def read_bytes(workspace: Workspace, path: str) -> bytes:
    """The bytes of a file. Raises ToolError for more than MAX_BYTES."""
    size = workspace.size(path)
    if size > MAX_BYTES:
        raise ToolError(f"{path} has {size} bytes, more than {MAX_BYTES}; look at parts of it with shell")
    return workspace.files[path]


def _cut(line: str) -> str:
    line = line.removesuffix("\r")
    return line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]} [{len(line) - MAX_LINE} characters more]"


def _suffix(workspace: Workspace, path: str) -> str:
    kind = workspace.kind(path)
    if kind == "link":
        return f" -> {workspace.target(path)}"
    return "/" if kind == "folder" else ""


def _limit_paths(paths: list[str]) -> str:
    more = [f"[{len(paths) - MAX_LISTED} more]"] if len(paths) > MAX_LISTED else []
    return "\n".join(paths[:MAX_LISTED] + more)


READ_FILE = Tool(
    "read_file",
    f"Show a file with line numbers, or a part of it; at most {MAX_LINES} lines at once.",
    object_schema(
        ("path",),
        path=PATH,
        start={"type": "integer", "minimum": 1, "description": "first line, default 1"},
        end={"type": "integer", "minimum": 1, "description": "last line, default the last of the file"},
    ),
    read_file,
    read_only=True,
)


LIST_DIR = Tool(
    "list_dir",
    "List what is in a folder.",
    object_schema(
        path={"type": "string", "description": "the folder, default the workspace"},
        depth={"type": "integer", "minimum": 1, "maximum": 10, "description": "levels of folders, default 1"},
    ),
    list_dir,
    read_only=True,
)


GLOB = Tool(
    "glob",
    "Find files by a pattern with *, ?, [...], {a,b} and ** for any folders; without a slash it is matched with "
    "the names of files in all folders.",
    object_schema(
        ("pattern",),
        pattern={"type": "string", "minLength": 1, "maxLength": 300, "description": "such as src/**/*_test.py"},
    ),
    glob,
    read_only=True,
)
