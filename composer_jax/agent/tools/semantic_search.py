"""The tool that finds code by its meaning."""

from composer_jax.agent.tools.paths import resolve_existing
from composer_jax.agent.tools.tool import UNDER, Tool, object_schema
from composer_jax.agent.workspace import Workspace

HITS = 8
MAX_LINES = 12  # of one hit
MAX_LINE = 160  # characters


async def semantic_search(workspace: Workspace, query: str, path: str = "") -> str:
    """The best chunks for a query: path, lines and name of each, and its first lines."""
    hits = await workspace.search(query, resolve_existing(workspace, path, "file", "folder"), HITS)
    lines = []
    for hit in hits:
        chunk = hit.chunk
        lines.append(f"{chunk.path}:{chunk.start}-{chunk.end}" + (f" {chunk.name}" if chunk.name else ""))
        text = chunk.text.split("\n")
        lines += [f"    {line.rstrip()[:MAX_LINE]}" for line in text[:MAX_LINES]]
        if len(text) > MAX_LINES:
            lines.append(f"    [{len(text) - MAX_LINES} lines more]")
    return "\n".join(lines) or "no match"


SEMANTIC_SEARCH = Tool(
    "semantic_search",
    "Find the functions and passages that a question or some words are about.",
    object_schema(
        ("query",),
        query={"type": "string", "minLength": 1, "maxLength": 1000, "description": "what to look for, in words"},
        path=UNDER,
    ),
    semantic_search,
    read_only=True,
)
