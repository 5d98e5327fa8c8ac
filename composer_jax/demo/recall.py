"""Recall: a fact is read early and needed late, and the context fills up in between.

A configuration file holds five facts (`rate = 47`) and some functions that only make it long. A function in
another file must be completed with one of the facts. Reading the configuration fires the summary trigger, so
the edit can use only facts that the summary holds. The instruction names the fact that is needed.

The visible tests reveal nothing: f(0) is 0 with every constant.
"""

from __future__ import annotations

import random

from composer_jax.agent.summary import FACTS
from composer_jax.demo import functions
from composer_jax.demo.functions import TRAINED_KINDS, module_text, statement
from composer_jax.demo.splits import KEYS, constants, draw_names, file_stems, function_names
from composer_jax.errors import UserError
from composer_jax.seeds import seeded_random
from composer_jax.tasks.grader import Case, CaseGrader
from composer_jax.tasks.task import Split, Task
from composer_jax.tasks.visible_cases import RUN_TESTS, visible_cases

FAMILY = "recall"
TOOLS = ("run_tests", "read", "edit", "finish")  # no grep: one line of it would make the long file short
STUB = "return 0"
HIDDEN_INPUTS = (0, 1, 2, 5, 10, 37)


def fact_line(key: str, value: int) -> str:
    """Returns a fact as it is written in the file, in a good summary and in the thought before the edit."""
    return f"{key} = {value}"


def generate(split: Split, seed: int, index: int, facts: int = 5, fillers: int = 3) -> Task:
    """Returns task number `index` of a stream: a pure function of its arguments, which takes under a millisecond.

    facts: lines in the configuration, 1..8; their values have two digits and different first digits.
    fillers: functions after them. Raises UserError if there are too many facts for that.
    """
    if not 1 <= facts <= 8:
        raise UserError(f"{facts} facts cannot all start with another digit; use 1 to 8")
    rng = seeded_random(FAMILY, split, seed, index, facts, fillers)
    names = draw_names(rng, function_names(split), 1 + fillers)
    conf, target = draw_names(rng, file_stems(split), 2)
    values = dict(zip(rng.sample(KEYS, facts), _values(split, facts, rng), strict=True))
    key = rng.choice(list(values))
    function = names[0]

    padding = [functions.make(rng.choice(TRAINED_KINDS), name, split, rng) for name in names[1:]]
    lines = "".join(fact_line(k, v) + "\n" for k, v in values.items())
    done = statement(f"x * {values[key]}")
    files = {
        f"{conf}.py": lines + "\n" + module_text(padding, {}),
        f"{target}.py": f"def {function}(x):\n    # x times {key}\n    {STUB}\n",
        "run_tests.py": RUN_TESTS,
        "cases.json": visible_cases([Case(target, function, (0,), 0)]),
    }
    cases = [Case(target, function, (x,), x * values[key]) for x in HIDDEN_INPUTS]
    for f in padding:
        cases += [Case(conf, f.name, args, f.value(args)) for args in functions.hidden_inputs(f, 2, [], rng)]
    return Task(
        id=f"{FAMILY}-{split}-{seed}-{index}",
        family=FAMILY,
        split=split,
        instruction=f"Complete {function} in {target}.py with {key} from {conf}.py.",
        files=files,
        tools=TOOLS,
        grader=CaseGrader(tuple(cases)),
        metadata={
            "kind": FAMILY,
            "conf": f"{conf}.py",
            "path": f"{target}.py",
            "function": function,
            "key": key,
            "facts": values,
            FACTS: [fact_line(key, values[key])],
            "old": STUB,
            "new": done,
            "constants": sorted({*values.values(), *(c for f in padding for c in f.constants)}),
        },
    )


def _values(split: Split, count: int, rng: random.Random) -> list[int]:
    """Returns two-digit constants of the split, no two with the same first digit."""
    by_digit: dict[int, list[int]] = {}
    for value in constants(split, 10, 99):
        by_digit.setdefault(value // 10, []).append(value)
    return [rng.choice(by_digit[digit]) for digit in rng.sample(sorted(by_digit), count)]


class Recall:
    """The family of recall tasks (tasks/family.py: TaskFamily)."""

    def generate(self, split: Split, seed: int, index: int) -> Task:
        """Returns task number `index` of the stream (split, seed)."""
        return generate(split, seed, index)
