"""Bugs that contradictory notes describe: whose notes are right is all that the agent has to find out.

A workspace is that of demo/bugfix.py without the comments, and a failing test names the function and nothing else.
Three people have a note on every broken function, each in a file of its own: ann/sort_page. It names the module and
says what the function should return, and the three disagree. In the tasks of reinforcement learning and of evaluation
the same person is always right, which nothing in the workspace or in the instruction says, and the messages suffice for
the note of one person on each function.
"""

import random
from dataclasses import replace

from composer_jax.demo.broken_modules import draw_task
from composer_jax.demo.functions import FOUR_WAY_KINDS
from composer_jax.errors import UserError
from composer_jax.seeds import seeded_random
from composer_jax.tasks.task import Split, Task

PEOPLE = ("ann", "bob", "eve")
RELIABLE = "ann"
"""Whose notes are right in the tasks of the families."""
MAX_TURNS = {1: 6, 2: 9, 3: 12}
"""Bugs -> messages of the agent: the tests, the end, and for each bug a note, its module, and a repair with the tests.
One message more lets it recover from a mistake. A second note and another repair take two, which are there only where
several bugs share a module, because it need not be read twice."""


def note_path(person: str, function: str) -> str:
    """Returns the file in which a person writes about a function."""
    return f"{person}/{function}"


def note(function: str, claim: str, path: str) -> str:
    """Returns what a person writes about a function of the module `path`; the claim is what it should return."""
    return f"{report(function, claim)} in {path}"


def report(function: str, claim: str) -> str:
    """Returns the part of a note that says what the function should return."""
    return f"{function}: {claim}"


def advice(person: str) -> str:
    """Returns the sentence, before an instruction, that says whose notes to try first."""
    return f"Follow the notes of {person}."


def generate(family: str, bugs: int, split: Split, seed: int, index: int, *, reliable: str | None = RELIABLE) -> Task:
    """Returns task number `index` of a stream: a pure function of its arguments, which takes about a millisecond.

    Every entry of Task.metadata["bugs"] (broken_modules.py) has the repairs that the notes describe: "notes" maps a
    person to [report, line].

    Args:
      bugs: how many of the four functions are wrong, each of another kind.
      reliable: the person whose notes are right; None draws one for each bug.

    Raises:
      UserError: nobody has that name.
    """
    if reliable not in (None, *PEOPLE):
        raise UserError(f"reliable={reliable!r}, but notes are those of {', '.join(PEOPLE)}, or None draws one.")
    rng = seeded_random("notes", bugs, split, seed, index, reliable)
    kinds = rng.sample(FOUR_WAY_KINDS, bugs)
    target = "any" if reliable is None else reliable
    task_id, turns = f"{family}-{split}-{seed}-{index}-{target}", MAX_TURNS[bugs]
    task = draw_task(task_id, family, split, kinds, rng, is_specified=False, max_turns=turns)
    return _add_notes(task, reliable, rng)


def _add_notes(task: Task, reliable: str | None, rng: random.Random) -> Task:
    """Returns the task with three notes on each bug; see `generate`."""
    files, described = dict(task.files), []
    for bug in task.metadata["bugs"]:
        right = reliable or rng.choice(PEOPLE)
        others = [person for person in PEOPLE if person != right]
        repairs = {right: bug["new"], **dict(zip(others, rng.sample(bug["wrong"], 2), strict=True))}
        claims = {person: bug["claims"][repairs[person]] for person in PEOPLE}
        files |= {
            note_path(person, bug["function"]): f"{note(bug['function'], claim, bug['path'])}\n"
            for person, claim in claims.items()
        }
        notes = {person: [report(bug["function"], claims[person]), repairs[person]] for person in PEOPLE}
        described.append({**bug, "notes": notes})
    return replace(task, files=files, metadata={**task.metadata, "bugs": described})


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
