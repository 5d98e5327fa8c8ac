"""Where the tasks of a run come from: generators, which never end, and paths, each of whose tasks is used once."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from composer_jax.demo.generate import FAMILIES, generate
from composer_jax.errors import UserError
from composer_jax.sandbox import SandboxLimits
from composer_jax.seeds import seeded_random
from composer_jax.tasks.formats import Options, read_tasks
from composer_jax.tasks.images.containers import require_images
from composer_jax.tasks.suites.run import SUITE_LIMITS
from composer_jax.tasks.task import Task


class TaskSource:
    """The tasks to train on, and those of a path to evaluate on.

    train, heldout: family -> the tasks of it that a path holds, in an order that the seed draws. A family of the first
      is not generated.
    """

    def __init__(
        self, seed: int, train: Path | None = None, heldout: Path | None = None, options: Options | None = None
    ):
        """train, heldout: whatever read_tasks understands. options: of reading; the split follows from the use.

        Raises UserError for a path that cannot be read, and for tasks that say that they are for the other use, that
        are for both, or that need an image which is not here.
        """
        self.seed = seed
        self.train: Mapping[str, Sequence[Task]] = _by_family(seed, train, "train", options)
        self.heldout: Mapping[str, Sequence[Task]] = _by_family(seed, heldout, "heldout", options)
        every = [task for tasks in (*self.train.values(), *self.heldout.values()) for task in tasks]
        require_images(task for task in every if task.image is not None)
        trained_on = {task.id for tasks in self.train.values() for task in tasks}
        for task in (task for tasks in self.heldout.values() for task in tasks):
            if task.id in trained_on:
                raise UserError(f"task {task.id} is in {train} and in {heldout}; take it out of one of them.")

    def task(self, family: str, index: int) -> Task:
        """Task number `index` to train on. Raises UserError for an unknown family, IndexError when a path has no more
        (see require)."""
        if family in self.train:
            return self.train[family][index]
        return generate(family, "train", self.seed, index)

    def require(self, groups: Mapping[str, int], steps: int) -> None:
        """Raises UserError unless every family is known and lasts for so many groups of it in every step: a task is
        used once."""
        if self.train and not any(groups.get(family) for family in self.train):
            raise UserError(
                f"tasks.train holds tasks of {', '.join(self.train)}, and rl.groups names none of them; set "
                f"rl.groups.{next(iter(self.train))}, or leave tasks.train empty."
            )
        for family, n in groups.items():
            if n == 0:
                continue
            if family not in (*self.train, *FAMILIES):
                held = f"those of tasks.train, {', '.join(self.train)}" if self.train else "tasks.train is empty"
                raise UserError(
                    f"rl.groups names the task family {family!r}; there are {', '.join(FAMILIES)}, and {held}."
                )
            if family in self.train and (have := len(self.train[family])) < steps * n:
                raise UserError(
                    f"rl.groups.{family}={n} in rl.steps={steps} are {steps * n} tasks, each used once, but "
                    f"tasks.train holds {have}; lower one of the two or add tasks."
                )

    def drawn(self, groups: Mapping[str, int]) -> dict[str, list[str]]:
        """Family -> ids of the tasks of a path that the groups use, in the order of their use: what a run that is
        continued must find again."""
        return {family: [task.id for task in tasks] for family, tasks in self.train.items() if groups.get(family)}

    @property
    def limits(self) -> SandboxLimits:
        """What sandboxes must allow for these tasks."""
        return SUITE_LIMITS if self.train or self.heldout else SandboxLimits()


def _by_family(
    seed: int, path: Path | None, split: Literal["train", "heldout"], options: Options | None
) -> dict[str, list[Task]]:
    found = defaultdict(list)
    if path is not None:
        for task in read_tasks(path, dataclasses.replace(options or Options(), split=split)):
            if (task.split == "train") != (split == "train"):
                raise UserError(
                    f"task {task.id} of tasks.{split}={path} says that it is of the split {task.split!r}; give it as "
                    f"tasks.{'heldout' if split == 'train' else 'train'}."
                )
            found[task.family].append(task)
    for family, tasks in found.items():
        tasks.sort(key=lambda task: task.id)
        seeded_random("order", seed, family).shuffle(tasks)
    return dict(sorted(found.items()))
