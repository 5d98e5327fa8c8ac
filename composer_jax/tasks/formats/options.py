"""What whoever reads tasks decides, as against what the tasks say."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from composer_jax.tasks.task import Split

TOOLS = ("repository/*",)  # all of them that work on any repository


def default_store() -> Path:
    """composer_jax/tasks in the user's cache folder ($XDG_CACHE_HOME or ~/.cache)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "composer_jax", "tasks")


@dataclass(frozen=True)
class Options:
    """repos: folder of git repositories (owner__name or owner/name), for rows that name a repository and a commit.
    packages: folder of installed Python packages. A row of a data set looks for its own below it, as
      owner__name/version, or owner__name where it has no version.
    store: where checkouts and workspaces are kept; they are made once.
    split: of all tasks; None: "train" for SWE-smith, "heldout" for benchmarks.
    tools: what the agent gets.
    """

    repos: Path | None = None
    packages: Path | None = None
    store: Path = field(default_factory=default_store)
    split: Split | None = None
    tools: tuple[str, ...] = TOOLS
