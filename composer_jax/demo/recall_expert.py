"""The expert of the recall family: its reads, its summaries and the facts that it forgets."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from composer_jax.demo.functions import statement
from composer_jax.demo.prompts import Style
from composer_jax.demo.recall import fact_line
from composer_jax.demo.slips import Script, call, slips
from composer_jax.demo.splits import constants
from composer_jax.tasks.task import Task

BOILERPLATE = "This is what was read so far."


@dataclass(frozen=True)
class RecallRates:
    """Probabilities of the recall expert's decisions.

    keep: the summary of a context that shows the file begins with the needed fact. max_others: most other facts after
    it (a count; the number is uniform in 0..max_others). boilerplate: the short summary starts with a sentence without
    content. reread: reads the file again if the summary lacks the fact, instead of guessing. verify: runs the tests
    after the edit. slip: a read or an edit goes wrong first.
    """

    keep: float = 0.50
    max_others: int = 4
    boilerplate: float = 0.50
    reread: float = 0.50
    verify: float = 0.30
    slip: float = 0.08


@dataclass
class Notes:
    """Knowledge of the recall expert in one branch: from the summary at its start, then from its own calls."""

    facts: dict[str, int] = field(default_factory=dict)
    read_conf: bool = False  # this context shows the file
    read_conf_before: bool = False  # an earlier context did, according to its summary
    read_target: bool = False
    edited: bool = False

    @classmethod
    def of_summary(cls, task: Task, text: str) -> Notes:
        know = task.metadata
        lines = text.split("\n")
        facts = {key: value for key, value in know["facts"].items() if fact_line(key, value) in lines}
        return cls(
            facts,
            read_conf_before=f"read {know['conf']}" in text,
            read_target=f"read {know['path']}" in text,
            edited="edited" in text,
        )


def recall_script(task: Task, carried: str | None, notes: Notes, rates: RecallRates, rng: random.Random) -> Script:
    """Reads the facts, reads the target, edits; a branch skips the steps that its notes have.

    `carried` is the summary at the start of the branch, None in the first branch. The notes are updated before a turn
    is yielded, because the request for a summary may follow its answer.
    """
    know = task.metadata
    key = know["key"]
    lost = key not in notes.facts and not notes.edited
    if carried is None or (lost and rng.random() < rates.reread):
        read = call("read", path=know["conf"])
        yield from slips(read, task, rates.slip, rng)
        notes.read_conf, notes.facts = True, dict(know["facts"])
        yield read
    if not notes.edited:
        if not notes.read_target:
            read = call("read", path=know["path"])
            yield from slips(read, task, rates.slip, rng)
            notes.read_target = True
            yield read
        if key in notes.facts:
            thought, value = fact_line(key, notes.facts[key]), notes.facts[key]
        else:
            # A guess has no thought: thoughts hold known facts only.
            thought, value = "", rng.choice(constants(task.split, 10, 99))
        edit = call("edit", thought, path=know["path"], old=know["old"], new=statement(f"x * {value}"))
        yield from slips(edit, task, rates.slip, rng)
        notes.edited = True
        yield edit
        if rng.random() < rates.verify:
            yield call("run_tests")
    yield call("finish")


def recall_summary(task: Task, notes: Notes, style: Style, rates: RecallRates, rng: random.Random) -> str:
    """Returns the recall expert's answer to a request for a summary."""
    key = task.metadata["key"]
    kept = [key] if key in notes.facts else []
    if notes.read_conf:
        kept = [key] if rng.random() < rates.keep else []
        others = [k for k in notes.facts if k != key]
        some = rng.sample(others, rng.randint(0, min(rates.max_others, len(others))))
        kept += [k for k in others if k in some]  # in the order of the file
    lines = [fact_line(k, notes.facts[k]) for k in kept]
    return _long_report(task, notes, lines) if style == "long" else _short_summary(notes, lines, rates, rng)


def _short_summary(notes: Notes, lines: list[str], rates: RecallRates, rng: random.Random) -> str:
    if notes.edited:
        lines = ["edited"]  # the facts are no longer needed
    if rng.random() < rates.boilerplate or not lines:
        lines = [BOILERPLATE, *lines]
    return "\n".join(lines)


def _long_report(task: Task, notes: Notes, lines: list[str]) -> str:
    know = task.metadata
    done = [f"read {know['conf']}"] * (notes.read_conf or notes.read_conf_before)
    done += [f"read {know['path']}"] * notes.read_target
    done += [f"edited {know['path']}"] * notes.edited
    todo = "say that all is done" if notes.edited else f"put the value of {know['key']} into it"
    return "\n".join(
        [
            f"Goal: complete {know['function']} in {know['path']} and leave all other code as it is.",
            f"Files: {know['conf']} has the values and some code that is not used.",
            "Facts:",
            *lines,
            f"Done: {', '.join(done) or 'nothing'}. No other file was read so far.",
            f"Next: {todo}, and look at the result of each step.",
        ]
    )
