"""Bug fixing: two modules of two functions, each with its specification, and one wrong line.

The agent finds out which function fails (run_tests), where it is (grep), what it should do (read), repairs it
(edit) and says so (finish). Splits: "train" and "heldout" draw from the same kinds of function but share no
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
    """Task number `index` of a stream: a pure function of its arguments, about a millisecond.

    kind: which kind of function holds the bug; "mix" draws one of TRAINED_KINDS. Of the split "unseen" it is
    always "composed", which no other split has. Raises UserError for an unknown kind.
    """
    if split == "unseen":
        kind = COMPOSED
    elif kind not in ("mix", *TRAINED_KINDS):
        raise UserError(f"{kind!r} is not a kind of bug for split {split}; use mix or {', '.join(TRAINED_KINDS)}")
    rng = seeded_random(FAMILY, kind, split, seed, index)
    while True:
        # Once in a while two lines collide; the next draw of the same generator will do.
        task = _draw(split, f"{FAMILY}-{kind}-{split}-{seed}-{index}", kind, rng)
        if task is not None:
            return task


def _draw(split: Split, task_id: str, kind: str, rng: random.Random) -> Task | None:
    """One task, or None when an edit of it would be ambiguous."""
    if kind == "mix":
        kind = rng.choice(TRAINED_KINDS)
    kinds = [kind, *(rng.choice(TRAINED_KINDS) for _ in range(3))]
    names = draw_names(rng, function_names(split), 4)
    made = [functions.make(k, name, split, rng) for k, name in zip(kinds, names, strict=True)]
    broken, mistake = made[0], rng.choice(made[0].wrong)
    rng.shuffle(made)
    stems = draw_names(rng, file_stems(split), 2)
    modules = {stems[0]: made[:2], stems[1]: made[2:]}
    here = next(stem for stem in stems if broken in modules[stem])
    neighbour = next(f for f in modules[here] if f is not broken)
    candidates = [statement(e) for e in (broken.right, *broken.wrong)]
    if not _unambiguous(candidates, statement(neighbour.right)):
        return None

    visible = {f.name: _visible_inputs(f, mistake if f is broken else None, rng) for f in made}
    hidden = {
        f.name: functions.hidden_inputs(f, HIDDEN_IN_BUG if f is broken else HIDDEN_ELSEWHERE, visible[f.name], rng)
        for f in made
    }
    module_of = {f.name: stem for stem in stems for f in modules[stem]}

    def cases(inputs: dict[str, list[tuple]]) -> list[Case]:
        return [Case(module_of[f.name], f.name, args, f.value(args)) for f in made for args in inputs[f.name]]

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
            "constants": sorted({c for f in made for c in f.constants}),
        },
    )


def _unambiguous(candidates: Sequence[str], neighbour: str) -> bool:
    """Whether each candidate line, once in the file, is the only place where its text occurs."""
    return not any(candidate in neighbour for candidate in candidates)


def _visible_inputs(function: Function, mistake: str | None, rng: random.Random) -> list[tuple]:
    """The inputs of the visible cases; where there is a mistake, the first of them fails."""
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
