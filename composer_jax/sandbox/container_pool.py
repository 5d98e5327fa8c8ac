"""Sandboxes in containers, for tasks that cannot run without their image. Slower to start than the others by far.

pool = ContainerPool("swebench/sweb.eval.x86_64.astropy_1776_astropy-12907")   # pulled before
sandbox = await pool.acquire({})
result = await sandbox.run(["python", "-m", "pytest", "-q"])
changes = await sandbox.changes()

The walls are those of Docker or Podman with less: no network, no capability that was not asked for, no new privileges,
no folder of the host, limits on memory, CPUs and processes. Snapshots and forks of other sandboxes are not there.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Mapping, Sequence
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.sandbox.container import Container
from composer_jax.sandbox.engine import Engine, find_engine
from composer_jax.sandbox.limits import SandboxLimits
from composer_jax.sandbox.protocol import Capabilities
from composer_jax.sandbox.tree_cache import TreeCache

DEFAULT_FOLDER = "/workspace"


class ContainerPool:
    """Sandboxes of one image; called as a SandboxPool is, but for what is said at `acquire`.

    cpus: of each container. linux_capabilities: those that its root keeps (KILL, CHOWN, ...). environment: variables
      of every command. workspace: the folder of the image that counts as the workspace; None: the one in which its
      commands start, or /workspace.
    turns: counts the containers in use instead of size, for several pools together.
    hide_history: take away the workspace's .git, in which later commits may be seen; then it is no part of changes.
    limits: timeout_s, memory_mb (of the whole container, without swap), processes, open_files (of one process) and
      output_kb hold here, and workspace_mb for what read, changes and their listings may hold. cpu_s, file_mb, tmp_mb
      and output_stop_mb do not count, and what commands write to the container's disk is not limited.
    Raises UserError where there is no working engine or no such image here. Removes what crashed owners left behind.
    """

    def __init__(
        self,
        image: str,
        limits: SandboxLimits | None = None,
        size: int = 8,
        *,
        engine: Engine | None = None,
        cpus: float = 1.0,
        linux_capabilities: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        workspace: str | None = None,
        hide_history: bool = False,
        turns: asyncio.Semaphore | None = None,
    ):
        self.engine = engine or find_engine()
        self.image = image
        self.limits = limits or SandboxLimits(memory_mb=2048, processes=512)
        self.cpus = cpus
        self.linux_capabilities = tuple(linux_capabilities)
        self.hide_history = hide_history
        self.environment = dict(environment or {})
        start = self.engine.working_folder(image)
        self.workspace = posixpath.normpath(workspace or (start if start not in ("", "/") else DEFAULT_FOLDER))
        self._is_resolved = False  # whether the workspace is known by its path without links, by which engines go
        for volume in self.engine.volumes(image):
            apart, inside = f"{posixpath.normpath(volume).rstrip('/')}/", f"{self.workspace.rstrip('/')}/"
            if apart.startswith(inside) or inside.startswith(apart):
                raise UserError(
                    f"the image {image} keeps {volume} in a volume, where changes of the workspace {self.workspace} "
                    "cannot be seen; use an image without it"
                )
        self.engine.remove_leftovers()
        self.trees = TreeCache(self.tree)
        self._turn = turns or asyncio.Semaphore(size)
        self._used: set[Container] = set()

    @property
    def capabilities(self) -> Capabilities:
        """What containers can do."""
        return Capabilities(
            can_snapshot=False,
            can_fork=False,
            can_mount_packages=False,
            can_mount_tests=True,
            can_use_network=True,
            can_set_output_limit=True,
            has_writable_system=True,
        )

    @property
    def workspace_paths(self) -> tuple[str, ...]:
        """The folder of the image that is the workspace."""
        return (self.workspace,)

    def tree(self, folder: Path | None = None) -> Path | None:
        """A folder that containers can be given. It is not copied here, so it must not change."""
        if folder is not None and not folder.is_dir():
            raise UserError(f"{folder} is not a folder; a workspace stands on one.")
        return folder

    async def acquire(
        self,
        files: Mapping[str, bytes | str],
        tree: Path | None = None,
        *,
        packages: Path | None = None,
        tests: Path | None = None,
        network: bool = False,
        grading: bool = False,
    ) -> Container:
        """A fresh container, with `tree` and then `files` laid over the workspace of the image.

        tests: copied to /tests, beside an empty /logs/verifier. network: the engine's default network.
        grading: leave the .git there even where the pool hides it, for scripts that use it.
        Raises UserError for packages, which an image brings itself; SandboxDied when it does not start.
        """
        if packages is not None:
            raise UserError(
                f"the image {self.image} has its own packages; a folder of them is for tasks without an image"
            )
        await self._turn.acquire()
        sandbox = Container(self, tree)
        self._used.add(sandbox)
        try:
            await sandbox.start(network, tests is not None)
            if not self._is_resolved:
                self.workspace, self._is_resolved = await sandbox.resolve_workspace(), True
            if self.hide_history and not grading:
                await sandbox.run_checked(["rm", "-rf", f"{self.workspace}/.git"])
            if tree is not None:
                await sandbox.copy_in(tree, self.workspace)
            if tests is not None:
                await sandbox.copy_in(tests, "/tests")
            if files:
                await sandbox.write_files(files)
        except BaseException:
            await asyncio.shield(sandbox.close())
            raise
        return sandbox

    async def close(self) -> None:
        """Ends every container of this pool."""
        for sandbox in list(self._used):
            await sandbox.close()

    async def __aenter__(self) -> ContainerPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def on_sandbox_end(self, sandbox: Container) -> None:
        """A sandbox has ended. (Container.close calls this.)"""
        self._used.remove(sandbox)
        self._turn.release()
