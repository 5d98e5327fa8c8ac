"""Tasks of the demo's families by name."""

from composer_jax.demo.bugfix import Bugfix
from composer_jax.demo.lookups import LOOKUPS
from composer_jax.demo.memory_chain import MemoryChain
from composer_jax.demo.notes import OneBug, ThreeBugs, TwoBugs
from composer_jax.errors import UserError
from composer_jax.tasks.family import TaskFamily
from composer_jax.tasks.task import Split, Task

FAMILIES: dict[str, TaskFamily] = {
    "bugfix": Bugfix(),
    "one_bug": OneBug(),
    "two_bugs": TwoBugs(),
    "three_bugs": ThreeBugs(),
    "memory_chain": MemoryChain(),
    **LOOKUPS,
}


def generate(family: str, split: Split, seed: int, index: int) -> Task:
    """Returns task number `index` of the stream (family, split, seed); takes about 1 ms.

    Raises:
      UserError: a family that is not one of FAMILIES.
    """
    if family not in FAMILIES:
        raise UserError(f"{family!r} is not a task family of the demo; use {' or '.join(FAMILIES)}.")
    return FAMILIES[family].generate(split, seed, index)
