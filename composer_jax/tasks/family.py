"""TaskFamily: a generator of tasks. A config names families by import path (tasks.families)."""

from typing import Protocol

from composer_jax.tasks.task import Split, Task


class TaskFamily(Protocol):
    """An endless stream of tasks for each split and seed."""

    def generate(self, split: Split, seed: int, index: int) -> Task:
        """Returns task number `index` of the stream (split, seed): a pure function of the arguments.

        Task.family is the name under which the config lists the family.
        """
        ...
