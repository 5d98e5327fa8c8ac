"""The tool that writes the agent's plan."""

from typing import Any

from composer_jax.agent.todos import STATUSES, Todo, format_plan
from composer_jax.agent.tools.tool import Tool, object_schema
from composer_jax.agent.workspace import Workspace


async def todo_write(workspace: Workspace, items: list[dict[str, Any]]) -> str:
    """Replaces the plan and returns it."""
    workspace.todos = tuple(Todo(item["content"], item["status"]) for item in items)
    return format_plan(workspace.todos) or "the plan is empty"


_ITEM = object_schema(
    ("content", "status"),
    content={"type": "string", "minLength": 1, "maxLength": 500},
    status={"type": "string", "enum": list(STATUSES)},
)
TODO_WRITE = Tool(
    "todo_write",
    "Write down the plan: all items, in place of those of before.",
    object_schema(
        ("items",),
        items={"type": "array", "maxItems": 50, "items": _ITEM, "description": "the items of the plan"},
    ),
    todo_write,
)
