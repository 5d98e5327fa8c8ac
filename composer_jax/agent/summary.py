"""Self-summarization: when the context gets long the model is asked for a summary, and goes on from that.

A new branch holds the task, the summary, and the state that the harness carries over: how many summaries there have
been, and the agent's plan. The summary is sampled like everything else the model says, so the reward of the episode
reaches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from composer_jax.data.chat_format import ChatFormat
from composer_jax.errors import UserError

Style = Literal["short", "long"]
REQUESTS: dict[Style, str] = {
    "short": "Summarize.",
    # The baseline: what one asks a model that has not learned to summarize.
    "long": "Write a report: Goal, Files, Facts, Done, Next.",
}
PLAN_CHARACTERS = 2000
"""Of a plan that is carried over a summary: ours. The agent can write a longer one, which would fill what is freed."""


@dataclass(frozen=True)
class Compaction:
    """When and how an episode is compacted.

    trigger: tokens of context, the next generation prompt included, above which a tool result is followed by a
      summary; None: never.
    style: which request is made.
    max_segments: branches an episode may have, the first included; needing one more ends it.
    max_summary_tokens: longest summary; a longer one is cut.
    """

    trigger: int | None = None
    style: Style = "short"
    max_segments: int = 5
    max_summary_tokens: int = 64

    def __post_init__(self) -> None:
        if self.style not in REQUESTS:
            raise UserError(f"summary style {self.style!r} is unknown; use {' or '.join(REQUESTS)}")
        for name in ("trigger", "max_segments", "max_summary_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"compaction.{name} is {value}; it must be at least 1")

    def due(self, length: int) -> bool:
        """Whether a context of `length` tokens is to be compacted."""
        return self.trigger is not None and length > self.trigger


def request(chat: ChatFormat, style: Style) -> list[int]:
    """The user message that asks for a summary."""
    return chat.user([REQUESTS[style]])


def carry(chat: ChatFormat, number: int, summary: Sequence[int], plan: str = "") -> list[int]:
    """The user message a new branch starts from, below the prompt: carried state, and the summary's own ids.

    number: how many summaries there have been, this one included. plan: what the agent has to do and has done, if it
    wrote that down (todos.format_plan); what is beyond PLAN_CHARACTERS of it is cut. Control tokens in the
    summary are left out (ChatFormat.user): a summary cannot speak in another role.
    """
    return chat.user([f"Summary {number}:\n", summary, *([f"\nPlan:\n{plan[:PLAN_CHARACTERS]}"] if plan else [])])
