"""Docker or Podman, through its command line: which one works here, and what it says."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from composer_jax.errors import UserError

ENGINES = ("docker", "podman")
INFO_S = 30.0
BUILD_S = 3600.0
OWNER = "composer_jax.owner"  # label of a container: who started it


@dataclass(frozen=True)
class Engine:
    """command: the path of docker or podman."""

    command: str

    def call(self, *words: str, timeout_s: float = INFO_S) -> subprocess.CompletedProcess[str]:
        """One command of the engine, whatever its exit code. Raises UserError when it hangs."""
        try:
            return subprocess.run(
                [self.command, *words], capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"{self.command} {words[0]} did not answer within {timeout_s:.0f} s; restart it") from None

    async def start(self, *words: str, stdin: IO[bytes] | int = subprocess.DEVNULL) -> asyncio.subprocess.Process:
        """A command of the engine whose output is read as it comes."""
        pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        # Where a container's command is killed for memory, Podman leaves a file `oom` in the folder it was called in.
        return await asyncio.create_subprocess_exec(self.command, *words, cwd=tempfile.gettempdir(), **pipes)

    def working_folder(self, image: str) -> str:
        """The folder in which an image's commands start; "" where it says none. Raises UserError for no such image."""
        shown = self.call("image", "inspect", "--format", "{{.Config.WorkingDir}}", image)
        if shown.returncode:
            raise UserError(f"{self.command} has no image {image}; pull or build it first")
        return shown.stdout.strip()

    def volumes(self, image: str) -> list[str]:
        """The folders that an image keeps outside of its containers' own layers."""
        shown = self.call("image", "inspect", "--format", "{{json .Config.Volumes}}", image)
        return sorted(json.loads(shown.stdout or "null") or {}) if shown.returncode == 0 else []

    def build(self, folder: Path | str, image: str) -> None:
        """Makes the image of a folder with a Dockerfile. Raises UserError with the last line that the engine says."""
        built = self.call("build", "--tag", image, str(folder), timeout_s=BUILD_S)
        if built.returncode:
            raise UserError(f"the image of {folder} cannot be built: {last_line(built.stderr or built.stdout)}")

    def remove_leftovers(self) -> int:
        """Removes containers whose owner, a process of this machine, ended without doing so. How many there were."""
        names = self.call("ps", "--all", "--quiet", "--filter", f"label={OWNER}").stdout.split()
        left = []
        for name in names:
            label = self.call("inspect", "--format", f'{{{{index .Config.Labels "{OWNER}"}}}}', name)
            if label.returncode == 0 and has_ended(label.stdout.strip()):
                left.append(name)
        if left:
            self.call("rm", "--force", *left)
        return len(left)


def find_engine(names: Sequence[str] = ENGINES) -> Engine:
    """The first engine that is installed and answers. Raises UserError saying of each what is missing."""
    missing = []
    for name in names:
        if (path := shutil.which(name)) is None:
            missing.append(f"{name} is not installed")
        elif (info := Engine(path).call("info")).returncode:
            missing.append(f"{name} does not work ({last_line(info.stderr)})")
        else:
            return Engine(path)
    raise UserError(f"tasks with a container image need Docker or Podman: {'; '.join(missing)}")


def owner() -> str:
    """This process, as a label of its containers: machine:process:when it started."""
    return f"{platform.node()}:{os.getpid()}:{_started(os.getpid())}"


def last_line(text: str) -> str:
    """The last line of what a program said."""
    return (text.strip().splitlines() or ["it says nothing"])[-1]


def has_ended(label: str) -> bool:
    """Whether the process of this machine that a label of owner() names is no more."""
    node, _, process = label.partition(":")
    pid, _, started = process.partition(":")
    return node == platform.node() and pid.isdecimal() and _started(int(pid)) != started


def _started(pid: int) -> str:
    """When a process started, in ticks since boot; "" where there is none, or no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
