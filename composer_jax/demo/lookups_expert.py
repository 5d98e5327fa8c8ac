"""The expert of lookups, to which a message costs nothing: it reads files side by side as often as one by one."""

from __future__ import annotations

import random

from composer_jax.data.chat.messages import ToolCall
from composer_jax.demo.lookups import ANSWER_FILE, UNKNOWN
from composer_jax.demo.memory_chain import quoted
from composer_jax.demo.slips import ExpertTurn, Script
from composer_jax.tasks.task import Task

SIDE_BY_SIDE = 0.5
"""Probability that a file is read in the message of the file before it."""


def lookup_script(task: Task, rng: random.Random) -> Script:
    """Reads the files in the order of the instruction, and answers."""
    messages: list[list[ToolCall]] = []
    for path in task.metadata["paths"]:
        if not messages or rng.random() >= SIDE_BY_SIDE:
            messages.append([])
        messages[-1].append(ToolCall("read", {"path": path}))
    for first, *more in messages:
        yield ExpertTurn("", first, more=tuple(more))
    edit = ToolCall("edit", {"path": ANSWER_FILE, "old": UNKNOWN, "new": quoted(task.metadata["answer"])})
    yield ExpertTurn("", edit, more=(ToolCall("finish", {}),))
