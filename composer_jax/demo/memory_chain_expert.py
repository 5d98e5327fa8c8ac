"""The expert of the memory chain, which does not know what the end will ask for.

Its chains ask for any of their items, so no choice of what to keep is better than another, and it does as well as the
limit of its summaries allows: it keeps one item of those that it knows, each with the same probability, and the name of
the next file. It answers from what it knows and otherwise guesses. No weakness is planted beyond that. A policy that
imitates it and plays chains that always ask for the first item keeps that item through three summaries rarely, and has
one thing to learn: which item is worth its place.
"""

import random
from dataclasses import dataclass, field
from typing import Self

from composer_jax.agent.summary import FACTS
from composer_jax.data.chat.messages import ToolCall
from composer_jax.demo.memory_chain import VALUES, item_line, next_line, quoted
from composer_jax.demo.prompts import Style
from composer_jax.demo.slips import ExpertTurn, Script, call
from composer_jax.errors import UserError
from composer_jax.tasks.task import Task


@dataclass
class ChainNotes:
    """Knowledge of the expert in one branch: from the summary at its start, then from its own reads.

    items: lines of items, with their values. following: the file to read next, or the last one. is_at_end: whether the
    last file was read, so that only the answer is left.
    """

    items: dict[str, str] = field(default_factory=dict)
    following: str = ""
    is_at_end: bool = False

    @classmethod
    def of_summary(cls, task: Task, carried: str | None) -> Self:
        """Returns what a branch knows at its start. carried: the summary; None in the first branch.

        Raises:
          UserError: the summary was cut before the name of the next file.
        """
        know = task.metadata
        if carried is None:
            return cls(following=know["paths"][0])
        lines = carried.split("\n")
        known = {line: value for line, value in know["items"].items() if line in lines}
        if any(line in lines for line in (know["paths"][-1], answer_line(task))):
            return cls(known, know["paths"][-1], is_at_end=True)
        following = [path for path in know["paths"] if next_line(path) in lines]
        if not following:
            raise UserError(f"the summary {carried!r} names no next file; raise max_summary_tokens of its compaction.")
        return cls(known, following[0])

    def read(self, task: Task) -> str:
        """Notes what the next file says, before the policy is asked for a summary of it; returns its path."""
        know, path = task.metadata, self.following
        at = know["paths"].index(path)
        if at < len(know["items"]):
            line = list(know["items"])[at]
            self.items[line] = know["items"][line]
            self.following = know["paths"][at + 1]
        self.is_at_end = at == len(know["items"])
        return path


def chain_script(task: Task, notes: ChainNotes, rng: random.Random) -> Script:
    """Reads file after file, and answers what the last one asks: the thought is the item, known or guessed."""
    know = task.metadata
    while not notes.is_at_end:
        yield call("read", path=notes.read(task))
    number = int(know["name"].rpartition("_")[2])
    lines = {line.partition(" = ")[0]: value for line, value in notes.items.items()}
    value = lines.get(know["name"]) or rng.choice(VALUES)  # a guess is right with probability memory_chain.CHANCE
    edit = call("edit", item_line(number, value), path=notes.following, old=know["name"], new=quoted(value))
    # The answer is the last message: it ends the chain whatever the context holds by then.
    yield ExpertTurn(edit.thought, edit.call, more=(ToolCall("finish", {}),))


def chain_summary(task: Task, notes: ChainNotes, style: Style, rng: random.Random) -> str:
    """Returns the expert's answer to a request for a summary: one item if it has to be short, all in a report, and any
    number of items, each with the same probability, in a list."""
    step = answer_line(task) if notes.is_at_end else next_line(notes.following)
    if style != "long" and notes.is_at_end:
        # There is no room for the question beside an item, and no need for any item but the one that is asked for.
        (asked,) = task.metadata[FACTS]
        return f"{asked}\n{notes.following}" if asked in notes.items else step
    if style == "short":
        return f"{rng.choice(list(notes.items))}\n{step}"
    if style == "some":
        kept = set(rng.sample(list(notes.items), rng.randint(0, len(notes.items))))
        return "\n".join([*(item for item in notes.items if item in kept), step])
    facts = "\n".join(notes.items)
    return f"Goal: answer what the last file asks.\nFacts:\n{facts}\nNext:\n{step}"


def answer_line(task: Task) -> str:
    """Returns what is left to do after the last file, as a summary says it."""
    know = task.metadata
    return f"{know['paths'][-1]}: {know['name']}"
