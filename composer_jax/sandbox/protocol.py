"""What every kind of sandbox offers: the types that agents, graders and trainers are written against.

LocalSandboxPool (local_pool.py) and ContainerPool (container_pool.py) implement them. Code that gets a pool never asks
for its class: it asks `pool.capabilities`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias

from composer_jax.sandbox.change import Change
from composer_jax.sandbox.limits import SandboxLimits
from composer_jax.sandbox.run_result import RunResult
from composer_jax.sandbox.tree_cache import TreeCache

TreeHandle: TypeAlias = Any
"""A state of a workspace. Only the pool that made it can read it."""


@dataclass(frozen=True)
class Capabilities:
    """What the sandboxes of a pool can do beyond commands and changes of files.

    can_snapshot: Sandbox.snapshot and Sandbox.restore.
    can_fork: Sandbox.fork.
    can_mount_packages: acquire(packages=...).
    can_mount_tests: acquire(tests=...) and acquire(solution=...).
    can_use_network: acquire(network=True).
    can_set_output_limit: run(output_kb=...).
    has_writable_system: commands can change programs and settings outside the workspace, so the files of the workspace
      alone do not determine the result of a command.
    """

    can_snapshot: bool
    can_fork: bool
    can_mount_packages: bool
    can_mount_tests: bool
    can_use_network: bool
    can_set_output_limit: bool
    has_writable_system: bool


class AsyncCloseable(Protocol):
    """An async context manager that ends with `close`."""

    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Sandbox(AsyncCloseable, Protocol):
    """One isolated workspace with a process inside that runs commands; made by SandboxPool.acquire.

    Calls may overlap; they run one after the other. Every call raises SandboxDied once the sandbox is gone, and
    UserError when it needs a capability that the pool lacks. Paths are relative to the workspace.
    """

    name: str
    limits: SandboxLimits
    jobs: int
    """Processes that were running beside the shell when its last command ended."""
    tmp_is_empty: bool
    """Whether /tmp and /dev/shm held no files at the last call of `changes`; False where that is unknown."""

    async def read(self, path: str) -> bytes:
        """Returns the content of a file. Raises SandboxFileError."""
        ...

    async def write(self, path: str, data: bytes | str) -> None:
        """Creates or replaces a file, and creates the folders above it. Raises SandboxFileError."""
        ...

    async def write_files(self, files: Mapping[str, bytes | str]) -> None:
        """Creates or replaces several files at once. Raises SandboxFileError."""
        ...

    async def run(
        self, argv: Sequence[str], *, timeout_s: float | None = None, stdin: bytes = b"", output_kb: int | None = None
    ) -> RunResult:
        """Runs a command in the workspace and waits until it ends.

        timeout_s: None: SandboxLimits.timeout_s. output_kb: KiB kept of each stream (can_set_output_limit); None:
        SandboxLimits.output_kb.
        """
        ...

    async def shell(self, command: str, *, timeout_s: float | None = None) -> RunResult:
        """Runs a command in the sandbox's persistent shell, which keeps working folder, variables and jobs."""
        ...

    async def changes(self) -> dict[str, Change]:
        """Returns how the workspace differs from what it held at first: path -> Change. Raises SandboxFileError."""
        ...

    async def apply(self, changes: Mapping[str, Change]) -> None:
        """Makes these changes in the workspace; what is in the way is removed. Raises SandboxFileError."""
        ...

    async def snapshot(self) -> TreeHandle:
        """Returns the state of the workspace (can_snapshot)."""
        ...

    async def restore(self, tree: TreeHandle) -> None:
        """Returns the workspace to the state of a snapshot (can_snapshot)."""
        ...

    async def fork(self) -> Sandbox:
        """Returns another sandbox of the pool with the same workspace (can_fork)."""
        ...

    async def close(self) -> None:
        """Kills the sandbox and every process in it. Safe to call twice."""
        ...


class SandboxPool(AsyncCloseable, Protocol):
    """Hands out fresh sandboxes of one kind and waits while too many are in use. Use it from one event loop."""

    limits: SandboxLimits
    trees: TreeCache[Any]
    """The trees of folders that do not change, one for all callers."""

    @property
    def capabilities(self) -> Capabilities:
        """What the sandboxes of this pool can do."""
        ...

    @property
    def image(self) -> str | None:
        """The container image of the sandboxes; None: they run on the system of this machine."""
        ...

    @property
    def workspace_paths(self) -> tuple[str, ...]:
        """The absolute paths by which commands find the workspace, the usual one first."""
        ...

    def tree(self, folder: Path) -> TreeHandle:
        """Returns a tree that holds what is in a folder of this machine. Raises UserError when it cannot be read."""
        ...

    async def acquire(
        self,
        files: Mapping[str, bytes | str],
        tree: TreeHandle | None = None,
        *,
        packages: TreeHandle | None = None,
        tests: TreeHandle | None = None,
        network: bool = False,
        grading: bool = False,
        solution: TreeHandle | None = None,
    ) -> Sandbox:
        """Returns a fresh sandbox whose workspace holds `files` on top of `tree`; the caller closes it.

        packages: a tree that Python in the sandbox imports from. tests: a tree shown at /tests, beside an empty
        /logs/verifier. network: with the network of the host or of the engine. grading: the sandbox is for a grader,
        from which the pool hides nothing. solution: a tree shown at /solution.
        Raises UserError for an argument that the pool lacks the capability for, SandboxDied when no sandbox starts,
        SandboxFileError for a file that cannot be written.
        """
        ...

    async def close(self) -> None:
        """Ends every sandbox of this pool."""
        ...
