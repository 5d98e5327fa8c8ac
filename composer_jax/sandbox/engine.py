"""Docker or Podman, through its command line."""

import asyncio
import contextlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from composer_jax.errors import UserError
from composer_jax.sandbox.inside.truncated_output import TruncatedOutput

ENGINES = ("docker", "podman")
READ_SIZE = 65536
INFO_S = 30.0
BUILD_S = 3600.0
OWNER = "composer_jax.owner"  # label of a container: the process that started it


@dataclass(frozen=True)
class ContainerEngine:
    """command: the path of docker or podman."""

    command: str

    def call(self, *words: str, timeout_s: float = INFO_S) -> subprocess.CompletedProcess[str]:
        """Runs a command of the engine and returns it with its exit code. Raises UserError when it hangs."""
        try:
            return subprocess.run(
                [self.command, *words], capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"{self.command} {words[0]} did not answer within {timeout_s:.0f} s; restart it") from None

    async def start(self, *words: str, stdin: IO[bytes] | int = subprocess.DEVNULL) -> asyncio.subprocess.Process:
        """Starts a command of the engine, with pipes for its output."""
        pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        # Where a container's command is killed for memory, Podman leaves a file `oom` in the folder it was called in.
        return await asyncio.create_subprocess_exec(self.command, *words, cwd=tempfile.gettempdir(), **pipes)

    def working_folder(self, image: str) -> str:
        """Returns the working folder of an image, "" where it sets none. Raises UserError for a missing image."""
        inspected = self.call("image", "inspect", "--format", "{{.Config.WorkingDir}}", image)
        if inspected.returncode:
            raise UserError(f"{self.command} has no image {image}; pull or build it first")
        return inspected.stdout.strip()

    def volumes(self, image: str) -> list[str]:
        """Returns the volumes of an image: folders outside the layers of its containers."""
        inspected = self.call("image", "inspect", "--format", "{{json .Config.Volumes}}", image)
        return sorted(json.loads(inspected.stdout or "null") or {}) if inspected.returncode == 0 else []

    def build(self, folder: Path | str, image: str) -> None:
        """Builds an image from a folder with a Dockerfile. Raises UserError with the last line of the output."""
        built = self.call("build", "--tag", image, str(folder), timeout_s=BUILD_S)
        if built.returncode:
            raise UserError(f"the image of {folder} cannot be built: {last_line(built.stderr or built.stdout)}")

    def remove_leftovers(self) -> int:
        """Removes containers of processes of this machine that have ended; returns how many there were."""
        names = self.call("ps", "--all", "--quiet", "--filter", f"label={OWNER}").stdout.split()
        left = []
        for name in names:
            label = self.call("inspect", "--format", f'{{{{index .Config.Labels "{OWNER}"}}}}', name)
            if label.returncode == 0 and has_ended(label.stdout.strip()):
                left.append(name)
        if left:
            self.call("rm", "--force", *left)
        return len(left)


def find_engine() -> ContainerEngine:
    """Returns the first engine that is installed and works. Raises UserError with what each of them lacks."""
    missing = []
    for name in ENGINES:
        if (path := shutil.which(name)) is None:
            missing.append(f"{name} is not installed")
        elif (info := ContainerEngine(path).call("info")).returncode:
            missing.append(f"{name} does not work ({last_line(info.stderr)})")
        else:
            return ContainerEngine(path)
    raise UserError(f"tasks with a container image need Docker or Podman: {'; '.join(missing)}")


async def read_all(stream: asyncio.StreamReader | None, output: TruncatedOutput) -> None:
    """Reads a stream to its end."""
    while stream and (data := await stream.read(READ_SIZE)):
        output.add(data)


async def kill_process(process: asyncio.subprocess.Process) -> None:
    """Kills a process of the engine and waits for it; Python reports its end when its pipes are read to theirs."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    for stream in (process.stdout, process.stderr):
        while stream and await stream.read(READ_SIZE):
            pass
    await process.wait()


def owner() -> str:
    """Returns the label of the containers of this process: machine:process:start time."""
    return f"{platform.node()}:{os.getpid()}:{_started(os.getpid())}"


def last_line(text: str) -> str:
    """Returns the last line of the output of a program."""
    return (text.strip().splitlines() or ["no output"])[-1]


def has_ended(label: str) -> bool:
    """Whether a label of owner() names a process of this machine that has ended."""
    node, _, process = label.partition(":")
    pid, _, started = process.partition(":")
    return node == platform.node() and pid.isdecimal() and _started(int(pid)) != started


def _started(pid: int) -> str:
    """Returns the start time of a process in ticks since boot; "" where there is no process or no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
