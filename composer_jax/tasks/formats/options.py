"""The options of read_tasks: what the caller decides, as opposed to the tasks."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from composer_jax.tasks.task import Split

TOOLS = ("repository/*",)  # all tools that work on any repository


def default_store() -> Path:
    """Returns composer_jax/tasks in the user's cache folder ($XDG_CACHE_HOME or ~/.cache)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "composer_jax", "tasks")


@dataclass(frozen=True)
class ReadOptions:
    """repos: a folder of git repositories (owner__name or owner/name) with the commits that rows name. Rows only.
    packages: a folder of installed Python packages. Harbor directories use it as it is; rows use its subfolder
      owner__name/version, or owner__name for rows without a version.
    store: the folder that caches checkouts and workspaces.
    split: the split of all tasks; None: "train" for SWE-smith, "heldout" for benchmarks.
    tools: names of the tools that the agent gets.
    formats: import paths ("package.module:function") of a user's own formats (read.Format), tried before ours.

    A directory that write_task wrote holds all of this itself and ignores these options.
    """

    repos: Path | None = None
    packages: Path | None = None
    store: Path = field(default_factory=default_store)
    split: Split | None = None
    tools: tuple[str, ...] = TOOLS
    formats: tuple[str, ...] = ()
