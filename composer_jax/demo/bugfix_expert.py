"""The expert of the bug-fixing family with specifications: it knows the repair and wastes no step on the way to it."""

import random
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any

from composer_jax.data.chat.messages import ToolCall
from composer_jax.demo.slips import ExpertTurn, Script, call, slips
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

    def do(turn: ExpertTurn) -> Generator[ExpertTurn, str, str]:
        yield from slips(turn, task, slip, rng)
        return (yield turn)

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
