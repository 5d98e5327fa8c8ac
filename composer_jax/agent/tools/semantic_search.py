"""The tool that finds code by what it is about."""

from composer_jax.agent.tools.paths import refuse_links, resolve_path
from composer_jax.agent.tools.schema import ToolError
from composer_jax.agent.workspace import Workspace

HITS = 8
MAX_LINES = 12  # of one hit
MAX_LINE = 160  # characters


async def semantic_search(workspace: Workspace, query: str, path: str = "") -> str:
    """The best chunks for a query: where each is, and how it begins."""
    under = resolve_path(workspace, path)
    if under and workspace.kind(under) not in ("file", "folder"):
        refuse_links(workspace, under)
        raise ToolError(f"there is no file or folder {under}")
    hits = await workspace.search(query, under, HITS)
    said = []
    for hit in hits:
        chunk = hit.chunk
        said.append(f"{chunk.path}:{chunk.start}-{chunk.end}" + (f" {chunk.name}" if chunk.name else ""))
        lines = chunk.text.split("\n")
        said += [f"    {line.rstrip()[:MAX_LINE]}" for line in lines[:MAX_LINES]]
        if len(lines) > MAX_LINES:
            said.append(f"    [{len(lines) - MAX_LINES} lines more]")
    return "\n".join(said) or "no match"
