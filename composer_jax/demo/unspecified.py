"""Bugs without a specification: only the tests say whether a repair is right, and the agent has to search for it.

A workspace is that of demo/bugfix.py without the comments, and a failing test names the function and nothing else. What
`return x + 7` should be can only be found by trying: repairs of its kind are three. An expert shows some repairs of a
single bug, which it knows; no trace of SFT shows several bugs, or a search. The turns leave room for few wrong repairs,
so it pays to test, to try something new, and not to look at a file again.
"""

from __future__ import annotations

from composer_jax.demo.broken_modules import draw_task
from composer_jax.demo.functions import SEARCHABLE_KINDS
from composer_jax.seeds import seeded_random
from composer_jax.tasks.task import Split, Task

MAX_TURNS = {1: 9, 2: 10, 3: 11}
"""Bugs -> messages of the agent. Tests, a search, a file, a repair with its tests, and the end are 5 for one bug, so
there is room to try all repairs of its kind. Three bugs in two files take 9 if nothing is looked at twice and every
repair has the tests in the same message."""


def generate(family: str, bugs: int, split: Split, seed: int, index: int) -> Task:
    """Returns task number `index` of a stream: a pure function of its arguments, which takes about a millisecond.

    bugs: how many of the four functions are wrong, each of another kind.
    """
    rng = seeded_random("unspecified", bugs, split, seed, index)
    kinds = rng.sample(SEARCHABLE_KINDS, bugs)
    task_id, turns = f"{family}-{split}-{seed}-{index}", MAX_TURNS[bugs]
    return draw_task(task_id, family, split, kinds, rng, is_specified=False, max_turns=turns)


class OneBug:
    """The family of tasks with one bug (tasks/family.py: TaskFamily)."""

    FAMILY, BUGS = "one_bug", 1

    def generate(self, split: Split, seed: int, index: int) -> Task:
        """Returns task number `index` of the stream (split, seed)."""
        return generate(self.FAMILY, self.BUGS, split, seed, index)


class TwoBugs(OneBug):
    """The family of tasks with two bugs."""

    FAMILY, BUGS = "two_bugs", 2


class ThreeBugs(OneBug):
    """The family of tasks with three bugs."""

    FAMILY, BUGS = "three_bugs", 3
