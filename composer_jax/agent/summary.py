"""Self-summarization: a context that grows past its trigger is summarized, and the episode continues from the summary.

A new branch holds the task, the summary, and the state that the harness carries over: the number of summaries and the
agent's plan. The summary is sampled like every other message, so the episode's reward trains it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.errors import UserError
from composer_jax.tasks.task import Task

REQUEST = (
    "The context is nearly full. Write a summary from which you can continue without it: the goal, the files you "
    "changed and how, the facts and paths you still need, what failed, and the next step."
)
"""The user message that asks for a summary (not published); a config replaces it by agent.compactions.NAME.request."""

SUMMARY = "{summary}"
"""Stands for the summary in CARRY, which also may have {number}, the count of summaries, and {plan}, the plan below its
heading or nothing."""

CARRY = f"Summary {{number}}:\n{SUMMARY}{{plan}}"
"""The user message that a new branch starts with (not published); a config replaces it by
agent.compactions.NAME.carry."""

PLAN = "\nPlan:\n"
"""The heading of the plan (not published)."""

MAX_PLAN_CHARACTERS = 2000
"""Characters of a plan that are carried over a summary (not published). A longer plan would fill the freed context."""


@dataclass(frozen=True)
class Compaction:
    """When and how an episode's context is summarized.

    Raises UserError for a number below 1, an empty request, or a text to carry without the summary.
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
    carry: str = CARRY
    """Text of the user message that follows the prompt in the next branch (not published). {summary} stands for the
    summary, {number} for the count of summaries, {plan} for the plan below its heading."""
    train_failed_summaries: bool = True
    """Whether a failed summary is trained: one that was cut, or that has no text after the model's thinking. The rest
    of its episode is trained either way."""
    train_summaries: bool = True
    """Whether summaries are trained; False leaves all of them out of every loss and trains the rest of the episode. It
    is a control: what RL gains with it is not owed to better summaries. Name a compaction of its own for it in
    rl.compaction, because traces of SFT that are played with it teach no summaries either."""

    def __post_init__(self) -> None:
        if not self.request:
            raise UserError("compaction.request is empty; give the text that asks for a summary")
        if SUMMARY not in self.carry:
            raise UserError(f"compaction.carry={self.carry!r} lacks {SUMMARY}, which stands for the summary; add it")
        for name in ("trigger", "max_segments", "max_summary_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"compaction.{name} is {value}; it must be at least 1")

    def is_due(self, length: int, prompt: int) -> bool:
        """Returns whether a context of `length` tokens, of which `prompt` are the prompt, is to be summarized."""
        return self.trigger is not None and length > max(self.trigger, prompt + self.trigger // 2)

    def trains(self, failed: bool) -> bool:
        """Returns whether a summary is trained; `failed` says whether it is a failed one (is_failed)."""
        return self.train_summaries and (self.train_failed_summaries or not failed)


def carry_message(
    chat: ChatFormat, number: int, summary: Sequence[int], plan: str = "", carry: str = CARRY
) -> list[int]:
    """Returns the user message that a new branch starts with, after the prompt.

    Args:
      number: count of summaries so far, this one included.
      summary: token ids of the summary. Control tokens are left out (ChatFormat.user), so a summary cannot open a
        message of another role. What the model thought before it is left out, too (ChatFormat.without_thinking).
      plan: the agent's to-do list (todos.plan), cut to MAX_PLAN_CHARACTERS.
      carry: as in Compaction.
    """
    plan_text = f"{PLAN}{plan[:MAX_PLAN_CHARACTERS]}" if plan else ""
    values = {"{number}": str(number), "{plan}": plan_text}  # the plan last: it is any text
    before, after = carry.split(SUMMARY, 1)
    for name, value in values.items():
        before, after = before.replace(name, value), after.replace(name, value)
    return chat.user([before, chat.without_thinking(summary), after])


def is_failed(chat: ChatFormat, summary: Sequence[int]) -> bool:
    """Returns whether a summary was cut before one of the end tokens, or has no text besides what the model thought."""
    text = chat.text(summary[chat.thinking_length(summary) :])
    return set(chat.end_tokens).isdisjoint(summary) or not text.strip()


FACTS = "summary_facts"
"""Key of Task.metadata: the lines that a summary must hold for the task to be solved from it, where a family knows."""


def facts_kept(task: Task, chat: ChatFormat, summary: Sequence[int]) -> float | None:
    """Returns the fraction of a task's FACTS that are lines of a summary, thinking left out; None without any."""
    facts = task.metadata.get(FACTS)
    if not facts:
        return None
    lines = {line.strip() for line in chat.text(chat.without_thinking(summary)).split("\n")}
    return sum(fact in lines for fact in facts) / len(facts)
