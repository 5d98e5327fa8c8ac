"""One-line functions whose comment is their specification, and the plausible mistakes in each.

The task families build their modules from these. A kind is a small mapping from words to code ("times" -> "*")
that a model must know to repair a function of that kind. No training task contains the kind COMPOSED, which needs two
of those mappings at once and has only words and operators of the others.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from composer_jax.demo.splits import ADJECTIVES, THINGS, constants
from composer_jax.tasks.task import Split

OPERATORS = {"plus": "+", "minus": "-", "times": "*", "over": "//"}
ARITHMETIC = {f"x {word} {{c}}": f"x {operator} {{c}}" for word, operator in OPERATORS.items()}
COMPARISONS = {
    "is x at least {c}": "x >= {c}",
    "is x at most {c}": "x <= {c}",
    "is x above {c}": "x > {c}",
    "is x below {c}": "x < {c}",
}
ORDERS = {
    "larger of x and {c}": "max(x, {c})",
    "smaller of x and {c}": "min(x, {c})",
    "{c} minus x": "{c} - x",
    "{c} over x": "{c} // x",
}
RANGES = {
    "sum from {c} up to x": "sum(range({c}, x + 1))",
    "sum from {c} below x": "sum(range({c}, x))",
    "count from {c} up to x": "len(range({c}, x + 1))",
    "count from {c} below x": "len(range({c}, x))",
}
TEXTS = {
    "first {c} of text in upper case": "text[:{c}].upper()",
    "first {c} of text in lower case": "text[:{c}].lower()",
    "first {c} of text in title case": "text[:{c}].title()",
    "first {c} of text in reverse": "text[:{c}][::-1]",
}
SMALLEST, LARGEST = 2, 99  # constants in functions
X_INPUTS = tuple((x,) for x in [*range(2, 13), 40, 57, 86, 95, 10000])
"""Arguments of arithmetic. Small ones keep failures short; 10000 distinguishes division by 98 from division by 99."""


@dataclass(frozen=True)
class Function:
    """A one-line function.

    comment: its specification, without "# "; "" for none.
    right: the expression it must return. wrong: plausible mistakes of the same kind, each different from
    `right` on at least one element of `inputs`.
    claims: the specifications that the mistakes fulfil, in their order; () for kinds whose mistakes have none.
    inputs: argument tuples that distinguish right from wrong.
    constants: the integers drawn for it (those of its mistakes included), which belong to the split.
    """

    kind: str
    name: str
    params: tuple[str, ...]
    comment: str
    right: str
    wrong: tuple[str, ...]
    inputs: tuple[tuple[Any, ...], ...]
    constants: tuple[int, ...] = ()
    claims: tuple[str, ...] = ()

    def source(self, expression: str | None = None) -> str:
        """Returns the text of the function, which returns `expression` (default: the right one)."""
        return f"{self.head}\n    {statement(expression or self.right)}\n"

    @property
    def head(self) -> str:
        """Lines above the statement: name, parameters and specification, if there is one."""
        head = f"def {self.name}({', '.join(self.params)}):"
        return f"{head}\n    # {self.comment}" if self.comment else head

    def value(self, args: Sequence[Any], expression: str | None = None) -> Any:
        return _compiled(self.params, expression or self.right)(*args)

    def reveals(self, args: Sequence[Any], mistake: str) -> bool:
        """Returns whether `mistake` has another value than the right expression for `args`."""
        want, got = self.value(args), self.value(args, mistake)
        return type(want) is not type(got) or want != got


def statement(expression: str) -> str:
    return f"return {expression}"


def module_text(functions: Sequence[Function], mistakes: Mapping[str, str]) -> str:
    """Returns a module of these functions; `mistakes` maps a function's name to the wrong expression it returns."""
    return "\n".join(function.source(mistakes.get(function.name)) for function in functions)


def make(kind: str, name: str, split: Split, rng: random.Random) -> Function:
    """Returns a function of `kind` (a key of KINDS) called `name`, with constants of `split`."""
    return KINDS[kind](kind, name, split, rng)


def hidden_inputs(function: Function, count: int, used: Sequence[tuple], rng: random.Random) -> list[tuple]:
    """Returns at least `count` inputs that together reveal every mistake that the function may contain.

    It leaves out `used`, except if no other input reveals a mistake ("at least" and "above" differ in one point only).
    """
    unused = [args for args in function.inputs if args not in used]
    rng.shuffle(unused)
    chosen = unused[:count]
    for mistake in function.wrong:
        if not any(function.reveals(args, mistake) for args in chosen):
            chosen.append(next(args for args in [*unused, *used] if function.reveals(args, mistake)))
    return chosen


def _operator(kind: str, name: str, split: Split, rng: random.Random) -> Function:
    comment = rng.choice(list(ARITHMETIC))
    return _one_of(kind, name, ARITHMETIC, comment, rng.choice(constants(split, SMALLEST, LARGEST)), X_INPUTS)


def _constant(kind: str, name: str, split: Split, rng: random.Random) -> Function:
    word = rng.choice(list(OPERATORS))
    drawn = rng.sample(constants(split, SMALLEST, LARGEST), 3)
    right, *wrong = (f"x {OPERATORS[word]} {c}" for c in drawn)
    comment, *claims = (f"x {word} {c}" for c in drawn)
    return Function(kind, name, ("x",), comment, right, tuple(wrong), X_INPUTS, tuple(drawn), tuple(claims))


def _composed(kind: str, name: str, split: Split, rng: random.Random) -> Function:
    c, d = rng.sample(constants(split, SMALLEST, LARGEST), 2)
    first, second = rng.choice(("times", "over")), rng.choice(("plus", "minus"))
    op, then = OPERATORS[first], OPERATORS[second]
    swapped, flipped = ("//" if op == "*" else "*"), ("-" if then == "+" else "+")
    wrong = (f"x {op} {c} {flipped} {d}", f"x {swapped} {c} {then} {d}", f"x {op} {d} {then} {c}")
    comment, right = f"x {first} {c} {second} {d}", f"x {op} {c} {then} {d}"
    return Function(kind, name, ("x",), comment, right, wrong, X_INPUTS, (c, d))


def _comparison(kind: str, name: str, split: Split, rng: random.Random) -> Function:
    comment, c = rng.choice(list(COMPARISONS)), rng.choice(constants(split, SMALLEST, LARGEST))
    near = tuple((c + step,) for step in (0, 1, -1, 2, -2, 3, -3, 5, 8, -9))
    return _one_of(kind, name, COMPARISONS, comment, c, near)


def _order(kind: str, name: str, split: Split, rng: random.Random) -> Function:
    c = rng.choice(constants(split, SMALLEST, LARGEST))
    inputs = tuple((x,) for x in dict.fromkeys((c + 1, c - 1, c + 5, max(2, c - 5), c + 12, *range(2, 11), 10000)))
    return _one_of(kind, name, ORDERS, rng.choice(list(ORDERS)), c, inputs)


def _range(kind: str, name: str, split: Split, rng: random.Random) -> Function:
    c = rng.choice(constants(split, SMALLEST, LARGEST))
    return _one_of(kind, name, RANGES, rng.choice(list(RANGES)), c, tuple((c + step,) for step in range(1, 13)))


def _text(kind: str, name: str, split: Split, rng: random.Random) -> Function:
    c = rng.choice(constants(split, SMALLEST, LARGEST))
    # One capital and two words, so that all four results differ.
    inputs = tuple((f"{rng.choice(ADJECTIVES).title()} {rng.choice(THINGS)}",) for _ in range(12))
    return _one_of(kind, name, TEXTS, rng.choice(list(TEXTS)), c, tuple(dict.fromkeys(inputs)), "text")


def _one_of(
    kind: str,
    name: str,
    texts: Mapping[str, str],
    comment: str,
    c: int,
    inputs: tuple[tuple[Any, ...], ...],
    param: str = "x",
) -> Function:
    """Returns the function of one of `texts` with constant c; the others are its mistakes."""
    others = [other for other in texts if other != comment]
    wrong, claims = tuple(texts[other].format(c=c) for other in others), tuple(other.format(c=c) for other in others)
    return Function(kind, name, (param,), comment.format(c=c), texts[comment].format(c=c), wrong, inputs, (c,), claims)


KINDS: dict[str, Callable[[str, str, Split, random.Random], Function]] = {
    "operator": _operator,
    "constant": _constant,
    "comparison": _comparison,
    "order": _order,
    "range": _range,
    "text": _text,
    "composed": _composed,
}
COMPOSED = "composed"
TRAINED_KINDS = tuple(kind for kind in KINDS if kind != COMPOSED)
FOUR_WAY_KINDS = tuple(kind for kind in TRAINED_KINDS if kind != "constant")
"""Kinds with four expressions, so that three people can say three things of a function that returns the fourth."""


@lru_cache(maxsize=65536)
def _compiled(params: tuple[str, ...], expression: str) -> Callable[..., Any]:
    # The expressions come from this module only.
    return eval(f"lambda {', '.join(params)}: {expression}")
