"""Turns of a scripted expert, and the slips in its traces.

A slip is a mistake that models make as well: a path that does not exist, a line copied wrong, a call cut short, a
repair without effect. A slip is in the trace but never a target, so a model learns to recover from slips and not to
make them.
"""

import random
import re
from collections.abc import Generator
from dataclasses import dataclass, replace

from composer_jax.data.chat.messages import ToolCall
from composer_jax.demo.functions import LARGEST, SMALLEST
from composer_jax.demo.splits import constants, file_stems, function_names
from composer_jax.tasks.grading.cases import is_submitted
from composer_jax.tasks.task import Task


@dataclass(frozen=True)
class ExpertTurn:
    """A message of an expert: a line of thought ("" for none) and a call.

    slip: whether the message is a mistake, which is not trained. cut: the message stops in the middle of its last call.
    more: further calls in the same message.
    """

    thought: str
    call: ToolCall
    slip: bool = False
    cut: bool = False
    more: tuple[ToolCall, ...] = ()


Script = Generator[ExpertTurn, str, None]  # yields turns, receives observations; ends with finish


def call(name: str, thought: str = "", **arguments: str) -> ExpertTurn:
    return ExpertTurn(thought, ToolCall(name, arguments))


def with_slips(turn: ExpertTurn, task: Task, rate: float, rng: random.Random) -> Generator[ExpertTurn, str, str]:
    """Yields some wrong forms of a turn (often none) and then the turn; returns what is observed after the turn.

    The wrong forms leave the workspace unchanged. None of them shows a file, so a summary after a slip has no new
    facts.

    rate: probability of a wrong form; drawn again after each.
    """
    name = turn.call.name
    while rng.random() < rate:
        if name == "grep":
            slip = replace(turn, call=ToolCall(name, {"pattern": rng.choice(function_names(task.split))}))
        elif name == "read":
            missing = [stem for stem in rng.sample(file_stems(task.split), 3) if f"{stem}.py" not in task.files]
            slip = replace(turn, call=ToolCall(name, {"path": f"{missing[0]}.py"}))
        else:
            # Only the first call is cut: a message that is cut in a later one carries out the first.
            slip = rng.choice([replace(turn, cut=True, more=()), *_failing_edits(turn, task, rng)])
        yield replace(slip, slip=True)
    return (yield turn)


def _failing_edits(turn: ExpertTurn, task: Task, rng: random.Random) -> list[ExpertTurn]:
    """Returns edits that are close to `turn` and that the tool refuses."""
    right = turn.call.arguments
    others = [path for path in task.files if is_submitted(path) and path != right["path"]]
    candidates = [
        {"new": right["old"]},
        {"old": right["new"]},
        {"old": miscopied(right["old"], task, rng)},
        {"path": rng.choice(others)},
    ]
    return [
        replace(turn, call=ToolCall("edit", edit))
        for edit in (right | candidate for candidate in candidates)
        if edit["old"] == edit["new"] or edit["old"] not in task.files[edit["path"]] + right["old"]
    ]


def miscopied(line: str, task: Task, rng: random.Random) -> str:
    """Returns the line with another number (of the task's split), or without one of its characters: a text that no
    file has."""
    number = re.search(r"\d+", line)
    while True:
        if number:
            other = rng.choice(constants(task.split, SMALLEST, LARGEST))
            wrong = f"{line[: number.start()]}{other}{line[number.end() :]}"
        else:
            at = rng.randrange(len("return "), len(line) - 1)
            wrong = line[:at] + line[at + 1 :]
        if not any(wrong in text for text in (line, *task.files.values())):
            return wrong
