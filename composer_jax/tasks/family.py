"""TaskFamily: a generator of tasks. A config names families by import path (tasks.families)."""

from collections.abc import Mapping
from typing import Protocol

from composer_jax.extensions import import_object
from composer_jax.tasks.task import Split, Task


class TaskFamily(Protocol):
    """An endless stream of tasks for each split and seed."""

    def generate(self, split: Split, seed: int, index: int) -> Task:
        """Returns task number `index` of the stream (split, seed): a pure function of the arguments.

        Task.family is the name under which the config lists the family.
        """
        ...


def import_families(paths: Mapping[str, str]) -> dict[str, TaskFamily]:
    """Imports the families of a config: name -> import path of a class without constructor arguments.

    Raises UserError when a path cannot be imported.
    """
    return {name: import_object(path, f"config.tasks.families.{name}")() for name, path in paths.items()}
