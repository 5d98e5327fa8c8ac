"""Sources of a run's tasks: families, which generate without end, and paths, each of whose tasks is used once."""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from composer_jax.errors import UserError
from composer_jax.extensions import import_object
from composer_jax.sandbox import SandboxLimits
from composer_jax.seeds import seeded_random
from composer_jax.storage.local_copy import local_copy
from composer_jax.tasks.config import TasksConfig
from composer_jax.tasks.family import TaskFamily
from composer_jax.tasks.formats import ReadOptions, read_tasks
from composer_jax.tasks.images import require_images
from composer_jax.tasks.network import require_network
from composer_jax.tasks.suites.run import SUITE_LIMITS
from composer_jax.tasks.task import Split, Task


class TaskSource:
    """The tasks to train on, and those of a path to evaluate on.

    families: name -> generator. train, heldout: family -> the tasks of it that a path holds, in an order drawn from the
      seed. A family of `train` is not generated.
    """

    def __init__(self, seed: int, config: TasksConfig, *, read_train: bool = True, network: str = "none"):
        """Imports the families and reads the paths of `config`; read_train=False leaves tasks.train unread.

        network: as in SandboxConfig.

        Raises UserError for a family that cannot be imported, a path that cannot be read, or tasks that belong to the
        other split, are in both paths, or need an image that is missing or a network that they do not get.
        """
        self.seed, self._network = seed, network
        self.families: dict[str, TaskFamily] = {
            name: import_object(path, f"config.tasks.families.{name}")() for name, path in config.families.items()
        }
        train, heldout = _path(config.train) if read_train else None, _path(config.heldout)
        options = ReadOptions(
            repos=_path(config.repos), packages=_path(config.packages), tools=config.tools, formats=config.formats
        )
        self.train: Mapping[str, Sequence[Task]] = _by_family(seed, train, "train", options)
        self.heldout: Mapping[str, Sequence[Task]] = _by_family(seed, heldout, "heldout", options)
        every = [task for tasks in (*self.train.values(), *self.heldout.values()) for task in tasks]
        require_network(every, network)
        require_images(task for task in every if task.image is not None)
        trained_on = {task.id for tasks in self.train.values() for task in tasks}
        for task in (task for tasks in self.heldout.values() for task in tasks):
            if task.id in trained_on:
                raise UserError(
                    f"task {task.id} is in {config.train} and in {config.heldout}; take it out of one of them."
                )

    def task(self, family: str, index: int) -> Task:
        """Returns task number `index` to train on.

        Raises:
          UserError: an unknown family. IndexError: a path has no more tasks (see `require`).
        """
        if family in self.train:
            return self.train[family][index]
        return self.generate(family, "train", self.seed, index)

    def has_task(self, family: str, index: int) -> bool:
        """Whether there is a task number `index` to train on; families that generate have one for every number."""
        return family not in self.train or index < len(self.train[family])

    def generate(self, family: str, split: Split, seed: int, index: int) -> Task:
        """Returns generated task number `index` of the stream (family, split, seed).

        Raises UserError for a family that tasks.families lacks, or that names its tasks otherwise than the config does.
        """
        if family not in self.families:
            raise UserError(
                f"{family!r} is not a task family; tasks.families has {', '.join(self.families) or 'none'}."
            )
        task = self.families[family].generate(split, seed, index)
        if task.family != family:
            raise UserError(f"tasks.families.{family} generates tasks of family {task.family!r}; use that name.")
        require_network([task], self._network)
        return task

    def require(
        self, groups: Mapping[str, int], steps: int, ladders: Mapping[str, Sequence[str]] = MappingProxyType({})
    ) -> None:
        """Checks that every family is known and has enough tasks for all steps: a task is used once.

        Args:
          groups: family -> groups of it in a step.
          ladders: family -> harder ones that its groups are drawn from as well; any of them may have to fill the run.

        Raises UserError when a family is not known or has too few tasks, or none has the tasks of the path.
        """
        families = {family: (n, "rl.groups", f"rl.groups.{family}={n}") for family, n in groups.items() if n}
        for first, harder in ladders.items():
            n, field = groups.get(first, 0), f"rl.curriculum.ladders.{first}"
            for rung in harder if n else ():
                setting = f"rl.groups.{first}={n}, all of which rl.curriculum.ladders may draw from {rung!r},"
                families[rung] = (n, field, setting)
        if self.train and not families.keys() & self.train.keys():
            raise UserError(
                f"tasks.train holds tasks of {', '.join(self.train)}, and rl.groups names none of them; set "
                f"rl.groups.{next(iter(self.train))}, or leave tasks.train empty."
            )
        for family, (n, field, setting) in families.items():
            if family not in (*self.train, *self.families):
                held = f"those of tasks.train, {', '.join(self.train)}" if self.train else "tasks.train is empty"
                generated = ", ".join(self.families) or "none"
                raise UserError(
                    f"{field} names the task family {family!r}; tasks.families has {generated}, and {held}."
                )
            if family in self.train and (have := len(self.train[family])) < steps * n:
                raise UserError(
                    f"{setting} in rl.steps={steps} are {steps * n} tasks, each used once, but tasks.train holds "
                    f"{have}; lower one of the two or add tasks."
                )

    def drawn(self, families: Collection[str]) -> dict[str, list[str]]:
        """Returns family -> ids of the tasks of a path that groups of these families use, in their order of use.

        A resumed run must find the same lists.
        """
        return {family: [task.id for task in tasks] for family, tasks in self.train.items() if family in families}

    @property
    def limits(self) -> SandboxLimits:
        """Limits of the sandboxes in which these tasks are played."""
        return SUITE_LIMITS if self.train or self.heldout else SandboxLimits()


def _path(text: str) -> Path | None:
    return local_copy(text) if text else None


def _by_family(
    seed: int, path: Path | None, split: Literal["train", "heldout"], options: ReadOptions
) -> dict[str, list[Task]]:
    by_family = defaultdict(list)
    if path is not None:
        for task in read_tasks(path, dataclasses.replace(options, split=split)):
            if (task.split == "train") != (split == "train"):
                raise UserError(
                    f"task {task.id} of tasks.{split}={path} says that it is of the split {task.split!r}; give it as "
                    f"tasks.{'heldout' if split == 'train' else 'train'}."
                )
            by_family[task.family].append(task)
    for family, tasks in by_family.items():
        tasks.sort(key=lambda task: task.id)
        seeded_random("order", seed, family).shuffle(tasks)
    return dict(sorted(by_family.items()))
