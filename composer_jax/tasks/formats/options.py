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
    """repos: for rows. A folder of git repositories (owner__name or owner/name) that have the commits which rows name.
    packages: for rows and for Harbor directories of others. A folder of installed Python packages, which is that of
      each directory; a row looks for its own below it, as owner__name/version, or owner__name where it has no version.
    store: for both. Where checkouts and workspaces are kept; they are made once.
    split: for both. None: "train" for SWE-smith, "heldout" for benchmarks.
    tools: for both. What the agent gets.
    formats: import paths ("package.module:function") of a user's own formats (read.Format), tried before ours.

    None of them counts for a directory that write_task wrote: it says all of this itself.
    """

    repos: Path | None = None
    packages: Path | None = None
    store: Path = field(default_factory=default_store)
    split: Split | None = None
    tools: tuple[str, ...] = TOOLS
    formats: tuple[str, ...] = ()
