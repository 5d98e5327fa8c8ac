"""The expert of the bug-fixing family: it knows the repair and follows a deliberately imperfect strategy."""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass, replace

from composer_jax.demo.slips import Script, Turn, call, miscopied, slips
from composer_jax.tasks.task import Task


@dataclass(frozen=True)
class BugfixRates:
    """Probabilities of the bug-fixing expert's decisions.

    give_up_*: finishes at once without a repair. right_fix: makes the right edit; a wrong one is a slip. verify: runs
    the tests after an edit; retry: repairs again if they still fail; reread: reads the file before that. slip: a grep,
    a read or an edit goes wrong first; drawn again after each slip.
    """

    give_up_after_failure: float = 0.35
    give_up_after_reading: float = 0.35
    right_fix: float = 0.80
    verify: float = 0.50
    retry: float = 0.80
    reread: float = 0.30
    slip: float = 0.12


def repair(task: Task) -> Turn:
    """Returns the edit that solves a bug-fixing task, as the expert writes it."""
    know = task.metadata
    # The thought quotes the file: the specification is found by copying the text after the name.
    thought = know["head"].removeprefix("def ")
    return call("edit", thought, path=know["path"], old=know["old"], new=know["new"])


def bugfix_script(task: Task, rates: BugfixRates, rng: random.Random) -> Script:
    """Runs the tests, finds the function, reads it, repairs it and perhaps runs the tests again."""
    know = task.metadata
    path, line, right = know["path"], know["old"], repair(task)

    def do(turn: Turn) -> Generator[Turn, str, str]:
        yield from slips(turn, task, rates.slip, rng)
        return (yield turn)

    failure = yield call("run_tests")
    if rng.random() < rates.give_up_after_failure:
        yield call("finish")
        return
    yield from do(call("grep", pattern=failure.removeprefix("FAIL ").partition("(")[0]))
    yield from do(call("read", path=path))
    if rng.random() < rates.give_up_after_reading:
        yield call("finish")
        return

    while True:
        wrong = [fix for fix in (*know["wrong"], miscopied(know["new"], task, rng)) if fix != line]
        slipped = bool(wrong) and rng.random() >= rates.right_fix
        fix = rng.choice(wrong) if slipped else know["new"]
        edit = replace(call("edit", right.thought, path=path, old=line, new=fix), slip=slipped)
        if (yield from do(edit)) == "ok":
            line = fix
        if rng.random() >= rates.verify:
            break
        report = yield call("run_tests")
        if report.startswith("PASS") or rng.random() >= rates.retry:
            break
        if rng.random() < rates.reread:
            yield from do(call("read", path=path))
    yield call("finish")
