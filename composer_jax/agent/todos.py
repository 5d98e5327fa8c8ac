"""The agent's plan: items and their status."""

from dataclasses import dataclass
from typing import Literal, get_args

Status = Literal["pending", "in_progress", "done"]
STATUSES: tuple[Status, ...] = get_args(Status)
_MARKS = {"pending": "[ ]", "in_progress": "[>]", "done": "[x]"}


@dataclass(frozen=True)
class Todo:
    """One item of the plan."""

    content: str
    status: Status


def format_plan(todos: tuple[Todo, ...]) -> str:
    """The plan as the model sees it, one line for each item."""
    return "\n".join(f"{_MARKS[todo.status]} {todo.content}" for todo in todos)
