"""The tasks section of a run's config."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from composer_jax.tasks.formats.options import TOOLS


@dataclass(frozen=True)
class TasksConfig:
    """Task families, and tasks from disk: the folder that `launch.tasks generate` wrote, Harbor directories, or rows of
    SWE-bench and SWE-smith. `launch.tasks show PATH` says whether a path can be read."""

    families: Mapping[str, str] = field(default_factory=dict)
    """Name -> import path of a task family (tasks/family.py); its tasks are generated."""
    train: str = ""
    """Path or URL (gs://...) of tasks to train on, or empty; rl.groups says how many of each family. Each task is used
    once."""
    heldout: str = ""
    """Path or URL of tasks to evaluate on, or empty; each family becomes a suite of its own, with all its tasks."""
    repos: str = ""
    """Folder or URL of git repositories that rows of SWE-bench and SWE-smith need."""
    packages: str = ""
    """Folder or URL of installed packages, for such rows and for Harbor directories that bring none."""
    tools: tuple[str, ...] = TOOLS
    """Tools of tasks that are read from such rows and directories: names or import paths (agent/tools)."""
    formats: tuple[str, ...] = ()
    """Import paths of task formats of your own (tasks/formats/read.py), which are tried before ours."""
