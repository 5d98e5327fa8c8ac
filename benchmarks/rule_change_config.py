"""The config of benchmarks.rule_change: configs/tiny.py, evaluated before and after a change of the rule of notes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ml_collections import ConfigDict

from composer_jax.demo import notes
from composer_jax.demo.notes import PEOPLE, RELIABLE, note_path
from composer_jax.tasks.task import Split, Task
from configs import tiny

SUCCESSOR = next(person for person in PEOPLE if person != RELIABLE)
"""Whose notes are right after the change."""
MESSAGES_PER_NOTE = 3
"""Messages of the agent that a further note on a function takes: the note, perhaps its module, and a repair."""

CAPACITY = 768
"""Tokens of the longest context."""


class SameRule:
    """One bug, with messages for the notes of everybody: the old rule, under which the first ones suffice."""

    FAMILY = "same_rule"

    def generate(self, split: Split, seed: int, index: int) -> Task:
        """Returns task number `index` of the stream (split, seed): that of OneBug, with more messages."""
        task = notes.generate(self.FAMILY, 1, split, seed, index)
        return replace(task, max_turns=notes.MAX_TURNS[1] + MESSAGES_PER_NOTE * (len(PEOPLE) - 1))


class ChangedRule(SameRule):
    """The same tasks, in which two people have changed places, so that the notes of the other one are right."""

    FAMILY = "changed_rule"

    def generate(self, split: Split, seed: int, index: int) -> Task:
        return exchange(super().generate(split, seed, index), RELIABLE, SUCCESSOR)


def exchange(task: Task, one: str, other: str) -> Task:
    """Returns the task in which the notes of two people have changed places."""
    files, bugs = dict(task.files), []
    for bug in task.metadata["bugs"]:
        mine, theirs = (note_path(person, bug["function"]) for person in (one, other))
        files[mine], files[theirs] = task.files[theirs], task.files[mine]
        bugs.append({**bug, "notes": {**bug["notes"], one: bug["notes"][other], other: bug["notes"][one]}})
    return replace(task, files=files, metadata={**task.metadata, "bugs": bugs})


FAMILIES = (SameRule, ChangedRule)


def get_config(size: str = "full") -> ConfigDict:
    """size: of configs/tiny.py. The suites are the families here, with the tasks and attempts of one_bug."""
    config: Any = tiny.get_config(size)
    config.tasks.families.update({family.FAMILY: f"{__name__}:{family.__name__}" for family in FAMILIES})
    suite = config.evaluate.suites.one_bug.to_dict()
    config.evaluate.suites = {family.FAMILY: {**suite, "family": family.FAMILY} for family in FAMILIES}
    config.evaluate.every = {}
    config.evaluate.update({"which": ("before",), "headline": (SameRule.FAMILY,)})
    # An episode that reads all notes is longer than those of configs/tiny.py. RL, which is not run, has to fit as well.
    config.sampler.max_model_len = CAPACITY
    config.rl.batches = ((CAPACITY, 2),)
    config.stages = ()
    return config
