"""Self-summarization: a context that grows past its trigger is summarized, and the episode continues from the summary.

A new branch holds the task, the summary, and the state that the harness carries over: the number of summaries and the
agent's plan. The summary is sampled like every other message, so the episode's reward trains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from composer_jax.data.chat_format import ChatFormat
from composer_jax.errors import UserError

REQUEST = (
    "The context is nearly full. Write a summary from which you can continue without it: the goal, the files you "
    "changed and how, the facts and paths you still need, what failed, and the next step."
)
MAX_PLAN_CHARACTERS = 2000
"""Characters of a plan that are carried over a summary (not published). A longer plan would fill the freed context."""


@dataclass(frozen=True)
class Compaction:
    """When and how an episode's context is summarized.

    Raises:
      UserError: a number below 1, or an empty request.
    """

    trigger: int | None = None
    """Tokens of context, the next generation prompt included, above which a tool result is followed by a summary; None
    never summarizes. Every branch repeats the prompt, so a summary also waits until half as many tokens follow the
    prompt: a long prompt would otherwise be followed by a summary after every answer."""
    request: str = REQUEST
    """Text of the user message that asks for the summary (not published)."""
    max_segments: int = 5
    """Branches of an episode, the first included; an episode that needs one more ends."""
    max_summary_tokens: int = 1024
    """Longest summary in tokens; a longer one is cut."""

    def __post_init__(self) -> None:
        if not self.request:
            raise UserError("compaction.request is empty; give the text that asks for a summary")
        for name in ("trigger", "max_segments", "max_summary_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"compaction.{name} is {value}; it must be at least 1")

    def is_due(self, length: int, prompt: int) -> bool:
        """Returns whether a context of `length` tokens, of which `prompt` are the prompt, is to be summarized."""
        return self.trigger is not None and length > max(self.trigger, prompt + self.trigger // 2)


def carry_message(chat: ChatFormat, number: int, summary: Sequence[int], plan: str = "") -> list[int]:
    """Returns the user message that a new branch starts with, after the prompt.

    Args:
      number: count of summaries so far, this one included.
      summary: token ids of the summary. Control tokens are left out (ChatFormat.user), so a summary cannot open a
        message of another role. What the model thought before it is left out, too (ChatFormat.without_thinking).
      plan: the agent's to-do list (todos.plan), cut to MAX_PLAN_CHARACTERS.
    """
    plan_parts = [f"\nPlan:\n{plan[:MAX_PLAN_CHARACTERS]}"] if plan else []
    return chat.user([f"Summary {number}:\n", chat.without_thinking(summary), *plan_parts])
