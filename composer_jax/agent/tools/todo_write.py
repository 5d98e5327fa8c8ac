"""The tool that writes the agent's plan."""

from typing import Any

from composer_jax.agent.todos import Todo, format_plan
from composer_jax.agent.workspace import Workspace


async def todo_write(workspace: Workspace, items: list[dict[str, Any]]) -> str:
    """Replaces the plan and returns it."""
    workspace.todos = tuple(Todo(item["content"], item["status"]) for item in items)
    return format_plan(workspace.todos) or "the plan is empty"
