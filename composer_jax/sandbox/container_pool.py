"""Sandboxes in containers, for tasks that cannot run without their image. They start far slower than local ones.

pool = ContainerPool("swebench/sweb.eval.x86_64.astropy_1776_astropy-12907")   # pulled before
sandbox = await pool.acquire({})
result = await sandbox.run(["python", "-m", "pytest", "-q"])
changes = await sandbox.changes()

Isolation is that of Docker or Podman with fewer rights: no network, no Linux capability that was not asked for, no new
privileges, no folder of the host, limits on memory, CPUs and processes. Containers have no snapshots and no forks.
"""

import asyncio
import posixpath
from collections.abc import Mapping, Sequence
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.sandbox.container import Container
from composer_jax.sandbox.engine import ContainerEngine, find_engine
from composer_jax.sandbox.limits import SandboxLimits
from composer_jax.sandbox.protocol import AsyncCloseable, Capabilities
from composer_jax.sandbox.tree_cache import TreeCache

DEFAULT_FOLDER = "/workspace"


class ContainerPool(AsyncCloseable):
    """A SandboxPool of one image.

    cpus: of each container. linux_capabilities: those that its root keeps (KILL, CHOWN, ...). environment: variables
      of every command. workspace: the folder of the image that is the workspace; None: its working folder, or
      /workspace.
    turns: limits the containers in use instead of `size`, for several pools together.
    hide_history: remove the .git of the workspace, which may hold later commits; changes then leave it out.
    limits: timeout_s, memory_mb (of the whole container, without swap), processes, open_files (of one process) and
      output_kb apply, and workspace_mb to what read, changes and their listings return. cpu_s, file_mb, tmp_mb and
      output_stop_mb do not apply, and what commands write to the disk of the container is not limited.
    Raises UserError without a working engine or the image. Removes containers that crashed owners left behind.
    """

    def __init__(
        self,
        image: str,
        limits: SandboxLimits | None = None,
        size: int = 8,
        *,
        engine: ContainerEngine | None = None,
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
        self._is_resolved = False  # whether `workspace` is a path without links, as engines print it
        for volume in self.engine.volumes(image):
            volume_path, workspace_path = f"{posixpath.normpath(volume).rstrip('/')}/", f"{self.workspace.rstrip('/')}/"
            if volume_path.startswith(workspace_path) or workspace_path.startswith(volume_path):
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
        """A folder that is copied into containers. It is not copied here, so it must not change."""
        if folder is not None and not folder.is_dir():
            raise UserError(f"{folder} is not a folder; a workspace needs one.")
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
        solution: Path | None = None,
    ) -> Container:
        """Returns a fresh container, with `tree` and then `files` copied over the workspace of the image.

        tests: copied to /tests, beside an empty /logs/verifier. network: the engine's default network.
        grading: keep the .git even where the pool hides it, for scripts that use it. solution: copied to /solution.
        Raises UserError for packages, which belong into the image; SandboxDied when the container does not start.
        """
        if packages is not None:
            raise UserError(
                f"the image {self.image} has its own packages; a folder of them is for tasks without an image"
            )
        await self._turn.acquire()
        sandbox = Container(self, tree)
        self._used.add(sandbox)
        try:
            folders = (*(("/tests", "/logs/verifier") if tests else ()), *(("/solution",) if solution else ()))
            await sandbox.start(network, folders)
            if not self._is_resolved:
                self.workspace, self._is_resolved = await sandbox.resolve_workspace(), True
            if self.hide_history and not grading:
                await sandbox.run_checked(["rm", "-rf", f"{self.workspace}/.git"])
            if tree is not None:
                await sandbox.copy_in(tree, self.workspace)
            if tests is not None:
                await sandbox.copy_in(tests, "/tests")
            if solution is not None:
                await sandbox.copy_in(solution, "/solution")
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

    def on_sandbox_end(self, sandbox: Container) -> None:
        """Gives the place of an ended sandbox to the next caller. Container.close calls this."""
        self._used.remove(sandbox)
        self._turn.release()
