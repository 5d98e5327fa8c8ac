"""Bug fixing: two modules of two functions, each with its specification, and one wrong line.

The agent learns which function fails (run_tests), where it is (grep) and what it should do (read), repairs it (edit)
and ends the episode (finish). Splits: "train" and "heldout" draw from the same kinds of function but share no
function name, no file name and no constant; "unseen" also takes a kind that training never saw.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from composer_jax.demo import functions
from composer_jax.demo.functions import COMPOSED, TRAINED_KINDS, Function, module_text, statement
from composer_jax.demo.splits import draw_names, file_stems, function_names
from composer_jax.errors import UserError
from composer_jax.seeds import seeded_random
from composer_jax.tasks.grader import Case, CaseGrader
from composer_jax.tasks.task import Split, Task
from composer_jax.tasks.visible_cases import RUN_TESTS, visible_cases

FAMILY = "bugfix"
TOOLS = ("run_tests", "grep", "read", "edit", "finish")
INSTRUCTION = "Fix the failing test."
VISIBLE_PER_FUNCTION = 2
HIDDEN_IN_BUG, HIDDEN_ELSEWHERE = 6, 3


def generate(split: Split, seed: int, index: int, kind: str = "mix") -> Task:
    """Returns task number `index` of a stream: a pure function of its arguments, which takes about a millisecond.

    kind: the kind of the function with the bug; "mix" draws one of TRAINED_KINDS. The split "unseen" always has
    "composed", which no other split has. Raises UserError for an unknown kind.
    """
    if split == "unseen":
        kind = COMPOSED
    elif kind not in ("mix", *TRAINED_KINDS):
        raise UserError(f"{kind!r} is not a kind of bug for split {split}; use mix or {', '.join(TRAINED_KINDS)}")
    rng = seeded_random(FAMILY, kind, split, seed, index)
    while True:
        # Two lines collide in a few draws; the generator then draws again.
        task = _draw(split, f"{FAMILY}-{kind}-{split}-{seed}-{index}", kind, rng)
        if task is not None:
            return task


def _draw(split: Split, task_id: str, kind: str, rng: random.Random) -> Task | None:
    """Returns one task, or None if an edit of it would be ambiguous."""
    if kind == "mix":
        kind = rng.choice(TRAINED_KINDS)
    kinds = [kind, *(rng.choice(TRAINED_KINDS) for _ in range(3))]
    names = draw_names(rng, function_names(split), 4)
    drawn = [functions.make(k, name, split, rng) for k, name in zip(kinds, names, strict=True)]
    broken, mistake = drawn[0], rng.choice(drawn[0].wrong)
    rng.shuffle(drawn)
    stems = draw_names(rng, file_stems(split), 2)
    modules = {stems[0]: drawn[:2], stems[1]: drawn[2:]}
    here = next(stem for stem in stems if broken in modules[stem])
    neighbour = next(f for f in modules[here] if f is not broken)
    candidates = [statement(e) for e in (broken.right, *broken.wrong)]
    if not _unambiguous(candidates, statement(neighbour.right)):
        return None

    visible = {f.name: _visible_inputs(f, mistake if f is broken else None, rng) for f in drawn}
    hidden = {
        f.name: functions.hidden_inputs(f, HIDDEN_IN_BUG if f is broken else HIDDEN_ELSEWHERE, visible[f.name], rng)
        for f in drawn
    }
    module_of = {f.name: stem for stem in stems for f in modules[stem]}

    def cases(inputs: dict[str, list[tuple]]) -> list[Case]:
        return [Case(module_of[f.name], f.name, args, f.value(args)) for f in drawn for args in inputs[f.name]]

    files = {f"{stem}.py": module_text(modules[stem], {broken.name: mistake}) for stem in stems}
    files |= {"run_tests.py": RUN_TESTS, "cases.json": visible_cases(cases(visible))}
    return Task(
        id=task_id,
        family=FAMILY,
        split=split,
        instruction=INSTRUCTION,
        files=files,
        tools=TOOLS,
        grader=CaseGrader(tuple(cases(hidden))),
        metadata={
            "kind": kind,
            "path": f"{here}.py",
            "function": broken.name,
            "head": broken.head,
            "old": statement(mistake),
            "new": statement(broken.right),
            "wrong": [statement(e) for e in broken.wrong if e != mistake],
            "constants": sorted({c for f in drawn for c in f.constants}),
        },
    )


def _unambiguous(candidates: Sequence[str], neighbour: str) -> bool:
    """Returns whether the text of each candidate line occurs nowhere else in its file."""
    return not any(candidate in neighbour for candidate in candidates)


def _visible_inputs(function: Function, mistake: str | None, rng: random.Random) -> list[tuple]:
    """Returns the inputs of the visible cases; the first one reveals the mistake, if there is one."""
    inputs = list(function.inputs)
    rng.shuffle(inputs)
    # Short ones first: the agent reads every character of a failure.
    inputs.sort(key=lambda args: (mistake is not None and not function.reveals(args, mistake), len(repr(args))))
    return inputs[:VISIBLE_PER_FUNCTION]


class Bugfix:
    """The family of bug-fixing tasks (tasks/family.py: TaskFamily)."""

    def generate(self, split: Split, seed: int, index: int) -> Task:
        """Returns task number `index` of the stream (split, seed)."""
        return generate(split, seed, index)
