"""One entrance to all generators."""

from __future__ import annotations

from composer_jax.demo import bugfix, recall
from composer_jax.errors import UserError
from composer_jax.seeds import seeded_random
from composer_jax.tasks.task import Split, Task

FAMILIES = (bugfix.FAMILY, recall.FAMILY)


def generate(family: str, split: Split, seed: int, index: int) -> Task:
    """Task number `index` of the stream (family, split, seed): a pure function of its arguments, about 1 ms.

    family: one of FAMILIES, or "mix" for one of them by a fair coin. Raises UserError for an unknown one.
    """
    if family == "mix":
        family = seeded_random("mix", split, seed, index).choice(FAMILIES)
    if family == bugfix.FAMILY:
        return bugfix.generate(split, seed, index)
    if family == recall.FAMILY:
        return recall.generate(split, seed, index)
    raise UserError(f"{family!r} is not a task family; use mix or {', '.join(FAMILIES)}")
