"""Bug fixing with specifications: a comment in every function says what it returns, and one or two of them do not.

The agent learns which function fails (run_tests), where it is (grep) and what it should do (read), repairs it (edit)
and ends the episode (finish). Splits: "train" and "heldout" draw from the same kinds of function but share no
function name, no file name and no constant, hence no specification and no repair; "unseen" has a kind that training
never saw.
"""

from composer_jax.demo.broken_modules import draw_task
from composer_jax.demo.functions import COMPOSED, TRAINED_KINDS
from composer_jax.errors import UserError
from composer_jax.seeds import seeded_random
from composer_jax.tasks.task import Split, Task

FAMILY = "bugfix"
TWO_BUGS = 0.3
"""Fraction of the tasks with two bugs; the others have one."""


def generate(split: Split, seed: int, index: int, kind: str = "mix", bugs: int | None = None) -> Task:
    """Returns task number `index` of a stream: a pure function of its arguments, which takes about a millisecond.

    kind: the kind of the functions with a bug; "mix" draws from TRAINED_KINDS. The split "unseen" always has one bug of
    "composed", which no other split has. bugs: how many functions are wrong, 1 or 2; None draws it. Raises
    UserError for an unknown kind or another number of bugs.
    """
    if split == "unseen":
        kind, bugs = COMPOSED, 1
    elif kind not in ("mix", *TRAINED_KINDS):
        raise UserError(f"{kind!r} is not a kind of bug for split {split}; use mix or {', '.join(TRAINED_KINDS)}")
    if bugs not in (None, 1, 2):
        # Three specifications that begin with the same word do not fit in two modules.
        raise UserError(f"bugs={bugs}; a bug-fixing task has 1 or 2, or None, which draws it")
    rng = seeded_random(FAMILY, kind, split, seed, index, bugs)
    count = bugs or (2 if rng.random() < TWO_BUGS else 1)
    kinds = [rng.choice(TRAINED_KINDS) if kind == "mix" else kind for _ in range(count)]
    number = "mix" if bugs is None else bugs
    return draw_task(f"{FAMILY}-{kind}-{number}-{split}-{seed}-{index}", FAMILY, split, kinds, rng, is_specified=True)


class Bugfix:
    """The family of bug-fixing tasks (tasks/family.py: TaskFamily)."""

    def generate(self, split: Split, seed: int, index: int) -> Task:
        """Returns task number `index` of the stream (split, seed)."""
        return generate(split, seed, index)
