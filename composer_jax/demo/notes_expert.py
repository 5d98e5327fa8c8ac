"""The expert of bugs that contradictory notes describe, which does not know whose notes are right.

In its tasks the right person is drawn for every bug, so nobody deserves more trust than another, and it does as well
as anybody can who does not know: it reads the notes of the three in random order and tries what they say, with the
tests in the same message, until these no longer name the function. A policy that imitates it and plays tasks in which
the same person is always right, with messages for one note on each function, has one thing to learn: whose notes to
read.
"""

import random
from collections.abc import Generator

from composer_jax.data.chat.messages import ToolCall
from composer_jax.demo.bugfix_expert import SLIP
from composer_jax.demo.notes import PEOPLE, note_path
from composer_jax.demo.slips import ExpertTurn, Script, call, slips
from composer_jax.tasks.task import Task


def draw_order(rng: random.Random) -> list[str]:
    """Returns the people in the order in which their notes on a function are read."""
    return rng.sample(PEOPLE, len(PEOPLE))


def notes_script(task: Task, rng: random.Random, slip: float = SLIP) -> Script:
    """Reads notes on the function that fails, tries what they say, and begins again until all tests pass.

    The thought before a repair is what the note says. slip: see bugfix_expert.SLIP.
    """
    bugs = {bug["function"]: bug for bug in task.metadata["bugs"]}
    seen: set[str] = set()

    def do(turn: ExpertTurn) -> Generator[ExpertTurn, str, str]:
        yield from slips(turn, task, slip, rng)
        return (yield turn)

    answer = yield call("run_tests")
    while answer.startswith("FAIL"):
        bug = bugs[answer.split()[1]]
        line = bug["old"]
        for person in draw_order(rng):
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
