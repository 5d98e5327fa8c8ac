"""Two modules of two functions, some of which return a wrong expression: the workspaces of the bug-fixing families."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from composer_jax.demo import functions
from composer_jax.demo.functions import TRAINED_KINDS, Function, module_text, statement
from composer_jax.demo.splits import draw_names, file_stems, function_names
from composer_jax.tasks.grader import Case, CaseGrader
from composer_jax.tasks.task import Split, Task
from composer_jax.tasks.visible_cases import RUN_TESTS, visible_cases

TOOLS = ("run_tests", "grep", "read", "edit", "finish")
INSTRUCTION = "Fix the failing test."
RUN_TESTS_BY_NAME = Path(__file__).with_name("run_tests_by_name.py").read_text(encoding="utf-8")
FUNCTIONS = 4
VISIBLE_PER_FUNCTION = 2
HIDDEN_IN_BUG, HIDDEN_ELSEWHERE = 6, 3


def draw_task(
    task_id: str,
    family: str,
    split: Split,
    kinds: Sequence[str],
    rng: random.Random,
    *,
    is_specified: bool,
    max_turns: int | None = None,
) -> Task:
    """Returns a task whose broken functions are of these kinds, one of each entry; the rest are intact.

    The visible tests of a broken function tell its right expression from every other one of its kind, so that an agent
    which sees them pass has repaired it. Task.metadata["bugs"] has, for every broken function, its module ("path"), its
    name ("function"), its head, the wrong and the right line ("old", "new"), the other lines of its kind ("wrong"), and
    the specification that each of these lines fulfils ("claims").

    Args:
      is_specified: whether every function has a comment that says what it returns, and a failing test says what the
      function returned and what it should; without, it says the function's name only.
    """
    while True:
        # Two lines collide in a few draws, and an edit would be ambiguous; the generator then draws again.
        task = _draw(task_id, family, split, kinds, rng, is_specified)
        if task is not None:
            return replace(task, max_turns=max_turns)


def _draw(
    task_id: str, family: str, split: Split, kinds: Sequence[str], rng: random.Random, is_specified: bool
) -> Task | None:
    """Returns one task, or None if an edit of it would be ambiguous."""
    names = draw_names(rng, function_names(split), FUNCTIONS)
    others = [rng.choice(TRAINED_KINDS) for _ in names[len(kinds) :]]
    drawn = [functions.make(kind, name, split, rng) for kind, name in zip([*kinds, *others], names, strict=True)]
    claims = {f.name: dict(zip((f.right, *f.wrong), (f.comment, *f.claims), strict=False)) for f in drawn}
    mistakes = {function.name: rng.choice(function.wrong) for function in drawn[: len(kinds)]}
    rng.shuffle(drawn)
    stems = draw_names(rng, file_stems(split), 2)
    modules = {stems[0]: drawn[:2], stems[1]: drawn[2:]}
    if not all(_unambiguous(module, mistakes) for module in modules.values()):
        return None
    # A small model confuses functions of one module whose specifications begin with the same word.
    if any(len({f.comment.split()[0] for f in module}) < len(module) for module in modules.values()):
        return None
    if not is_specified:
        modules = {stem: [replace(f, comment="") for f in module] for stem, module in modules.items()}
        drawn = [f for module in modules.values() for f in module]

    module_of = {function.name: stem for stem, module in modules.items() for function in module}
    visible = {f.name: _visible_inputs(f, mistakes.get(f.name), rng) for f in drawn}
    counts = {f.name: HIDDEN_IN_BUG if f.name in mistakes else HIDDEN_ELSEWHERE for f in drawn}
    hidden = {f.name: functions.hidden_inputs(f, counts[f.name], visible[f.name], rng) for f in drawn}

    def cases(inputs: dict[str, list[tuple]]) -> list[Case]:
        return [Case(module_of[f.name], f.name, args, f.value(args)) for f in drawn for args in inputs[f.name]]

    def bug(function: Function) -> dict[str, Any]:
        mistake = mistakes[function.name]
        return {
            "path": f"{module_of[function.name]}.py",
            "function": function.name,
            "head": function.head,
            "old": statement(mistake),
            "new": statement(function.right),
            "wrong": [statement(e) for e in function.wrong if e != mistake],
            "claims": {statement(e): claim for e, claim in claims[function.name].items()},
        }

    broken = sorted((f for f in drawn if f.name in mistakes), key=lambda f: names.index(f.name))
    files = {f"{stem}.py": module_text(module, mistakes) for stem, module in modules.items()}
    files["run_tests.py"] = RUN_TESTS if is_specified else RUN_TESTS_BY_NAME
    files["cases.json"] = visible_cases(cases(visible))
    return Task(
        id=task_id,
        family=family,
        split=split,
        instruction=INSTRUCTION,
        files=files,
        tools=TOOLS,
        grader=CaseGrader(tuple(cases(hidden))),
        metadata={
            "kind": kinds[0],
            "bugs": [bug(f) for f in broken],
            "constants": sorted({c for f in drawn for c in f.constants}),
        },
    )


def _unambiguous(module: Sequence[Function], mistakes: dict[str, str]) -> bool:
    """Returns whether no line that a broken function may get occurs in a line of the other function."""
    lines = {f.name: [f.right, *(f.wrong if f.name in mistakes else ())] for f in module}
    return not any(
        statement(line) in statement(other)
        for f in module
        if f.name in mistakes
        for line in lines[f.name]
        for g in module
        if g is not f
        for other in lines[g.name]
    )


def _visible_inputs(function: Function, mistake: str | None, rng: random.Random) -> list[tuple]:
    """Returns the inputs of the visible cases; the first one reveals the mistake, if there is one."""
    inputs = list(function.inputs)
    rng.shuffle(inputs)
    # Short ones first: the agent reads every character of a failure.
    inputs.sort(key=lambda args: (mistake is not None and not function.reveals(args, mistake), len(repr(args))))
    chosen = inputs[:VISIBLE_PER_FUNCTION]
    for wrong in function.wrong if mistake is not None else ():
        if not any(function.reveals(args, wrong) for args in chosen):
            chosen.append(next(args for args in inputs if function.reveals(args, wrong)))
    return chosen
