"""The experts of bug fixing.

That of bugs with specifications knows the repair and wastes no step on the way to it. That of bugs that contradictory
notes describe does not know whose notes are right. In its tasks the right person is drawn for every bug, so nobody
deserves more trust than another, and it does as well as anybody can who does not know: it reads the notes of the three
in random order and tries what they say, with the tests in the same message, until these no longer name the function. A
policy that imitates it and plays tasks in which the same person is always right, with messages for one note on each
function, has one thing to learn: whose notes to read.
"""

import functools
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from composer_jax.data.chat.messages import ToolCall
from composer_jax.demo.notes import PEOPLE, note_path
from composer_jax.demo.slips import ExpertTurn, Script, call, with_slips
from composer_jax.tasks.task import Task

SLIP = 0.12
"""Probability that a grep, a read or an edit goes wrong first; drawn again after each slip."""
WRONG = 0.15
"""Probability that a wrong repair, which takes effect, comes before the right one; drawn again after each."""
TOGETHER = 0.5
"""Fraction of the repairs that have the call of the tests in the same message. One message is as good as two here."""


def repair(bug: Mapping[str, Any]) -> ExpertTurn:
    """Returns the edit that repairs a bug (an entry of Task.metadata["bugs"]), as the expert writes it."""
    # The thought quotes the file: the specification is found by copying the text after the name.
    thought = bug["head"].removeprefix("def ")
    return call("edit", thought, path=bug["path"], old=bug["old"], new=bug["new"])


def _wrong_repairs(bug: Mapping[str, Any], rate: float, rng: random.Random) -> list[str]:
    """Returns lines of the bug's kind that are tried one after the other before the right one; often none."""
    lines = []
    while len(lines) < len(bug["wrong"]) and rng.random() < rate:
        lines.append(rng.choice([line for line in bug["wrong"] if line not in lines]))
    return lines


def bugfix_script(task: Task, rng: random.Random, slip: float = SLIP, wrong: float = WRONG) -> Script:
    """Runs the tests, finds the function that fails, reads it, repairs it, and begins again until all tests pass.

    slip, wrong: see SLIP and WRONG. Such turns are slips (demo/slips.py), which are not trained.
    """
    bugs = {bug["function"]: bug for bug in task.metadata["bugs"]}
    seen: set[str] = set()

    do = functools.partial(with_slips, task=task, rate=slip, rng=rng)
    report = yield call("run_tests")
    while report.startswith("FAIL"):
        bug = bugs[report.split()[1].partition("(")[0]]
        if bug["path"] not in seen:
            yield from do(call("grep", pattern=bug["function"]))
            yield from do(call("read", path=bug["path"]))
            seen.add(bug["path"])
        for line in _wrong_repairs(bug, wrong, rng):
            yield replace(repair(bug | {"new": line}), more=(ToolCall("run_tests", {}),), slip=True)
            bug = bug | {"old": line}
        if rng.random() < TOGETHER:
            report = yield from do(replace(repair(bug), more=(ToolCall("run_tests", {}),)))
        else:
            yield from do(repair(bug))
            report = yield call("run_tests")
    yield call("finish")


def draw_order(rng: random.Random) -> list[str]:
    """Returns the people in the order in which their notes on a function are read."""
    return rng.sample(PEOPLE, len(PEOPLE))


def notes_script(task: Task, rng: random.Random, slip: float = SLIP, first: str = "") -> Script:
    """Reads notes on the function that fails, tries what they say, and begins again until all tests pass.

    The thought before a repair is what the note says. slip: see SLIP. first: whose note is tried before the others.
    """
    bugs = {bug["function"]: bug for bug in task.metadata["bugs"]}
    seen: set[str] = set()

    do = functools.partial(with_slips, task=task, rate=slip, rng=rng)
    answer = yield call("run_tests")
    while answer.startswith("FAIL"):
        bug = bugs[answer.split()[1]]
        line = bug["old"]
        for person in sorted(draw_order(rng), key=lambda person: person != first):
            yield from do(call("read", path=note_path(person, bug["function"])))
            if bug["path"] not in seen:
                yield from do(call("read", path=bug["path"]))
                seen.add(bug["path"])
            said, repair = bug["notes"][person]
            edit = call("edit", said, path=bug["path"], old=line, new=repair)
            answer = yield from do(ExpertTurn(edit.thought, edit.call, more=(ToolCall("run_tests", {}),)))
            if answer != f"FAIL {bug['function']}":
                break
            line = repair
    yield call("finish")
