"""The expert of the bug-fixing family: it knows the repair and uses it with a deliberately imperfect strategy."""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass, replace

from composer_jax.demo.slips import Script, Turn, call, miscopied, slips
from composer_jax.tasks.task import Task


@dataclass(frozen=True)
class BugfixRates:
    """How often the bug-fixing expert does what (probabilities).

    give_up_*: finishes at once, with nothing repaired. right_fix: the edit is the right one; another one is a
    slip. verify: runs the tests after an edit; retry: repairs what they still show to be wrong; reread: looks at
    the file before that. slip: how often a grep, a read or an edit goes wrong first, and then again.
    """

    give_up_after_failure: float = 0.35
    give_up_after_reading: float = 0.35
    right_fix: float = 0.80
    verify: float = 0.50
    retry: float = 0.80
    reread: float = 0.30
    slip: float = 0.12


def repair(task: Task) -> Turn:
    """The edit that solves a bug-fixing task, as the expert writes it."""
    know = task.metadata
    # A quotation of the file, so that finding the specification is copying what follows the name.
    thought = know["head"].removeprefix("def ")
    return call("edit", thought, path=know["path"], old=know["old"], new=know["new"])


def bugfix_script(task: Task, rates: BugfixRates, rng: random.Random) -> Script:
    """Run the tests, find the function, read it, repair it, perhaps look whether that helped."""
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
