"""Containers for tasks that cannot run without an image of their own, and the initial contents of their workspaces."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.sandbox import SandboxDied, SandboxFileError, SandboxLimits, SandboxPool
from composer_jax.sandbox.container_pool import ContainerPool
from composer_jax.sandbox.engine import ContainerEngine, find_engine, has_ended, owner
from composer_jax.sandbox.protocol import AsyncCloseable
from composer_jax.tasks.grader import ScriptGrader
from composer_jax.tasks.task import Task

KEPT_WORKSPACES = 8  # tasks without a running episode whose workspaces stay on disk
FOLDER_PREFIX = "composer-images-"

CONTAINER_LIMITS = SandboxLimits(
    timeout_s=60.0, memory_mb=4096, processes=1024, open_files=4096, workspace_mb=512, output_kb=64
)
"""Default limits of a container. Our choice: enough for builds and tests of published tasks."""

INSTALL_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
"""Capabilities that package managers need. Only containers of tasks graded by a script get them, because such scripts
install packages. KILL lets root end processes of another user."""


def container_pool(
    task: Task, size: int = 8, engine: ContainerEngine | None = None, turns: asyncio.Semaphore | None = None
) -> ContainerPool:
    """Returns a pool of containers for one task, with the memory, CPUs, variables and folder that the task asks for.

    Builds the image if the task has a Dockerfile and the image does not exist. Raises UserError for a task without an
    image, without a working engine, and for a missing image that is not built here.

    size: containers in use at once. turns: bounds the containers in use across several pools.
    """
    if task.image is None:
        raise UserError(f"task {task.id} needs no image; run it in a LocalSandboxPool")
    engine = engine or find_engine()
    if "build" in task.metadata and engine.call("image", "inspect", task.image).returncode:
        engine.build(task.metadata["build"], task.image)
    resources = task.metadata.get("resources", {})
    memory_mb = max(64, int(resources.get("memory_mb", CONTAINER_LIMITS.memory_mb)))
    return ContainerPool(
        task.image,
        SandboxLimits(**{**vars(CONTAINER_LIMITS), "memory_mb": memory_mb}),
        size,
        engine=engine,
        cpus=resources.get("cpus", 1.0) or 1.0,
        linux_capabilities=INSTALL_CAPABILITIES if isinstance(task.grader, ScriptGrader) else (),
        environment=task.metadata.get("environment"),
        turns=turns,
        workspace=task.metadata.get("workdir"),
        hide_history=not isinstance(task.grader, ScriptGrader),  # a script's task may be about .git itself
    )


def require_images(tasks: Iterable[Task]) -> None:
    """Raises UserError without a working engine, and for an image that is neither on this machine nor built here."""
    images = [(task.image, "build" in task.metadata) for task in tasks if task.image is not None]
    if not images:
        return
    engine = find_engine()
    for image in sorted({image for image, is_built_here in images if not is_built_here}):
        engine.working_folder(image)


@dataclass(frozen=True)
class TaskWorkspace:
    """The place where a task's episodes run.

    pool: its sandboxes. base: a host folder with the initial contents of the workspace, except the task's own files;
    None: an empty workspace.
    """

    pool: SandboxPool
    base: Path | None


class ImagePools(AsyncCloseable):
    """The workspaces of tasks with an image, each created on first use. For one event loop.

    size: containers in use at once, over all images. engine: None: Docker or Podman, whichever works.
    """

    def __init__(self, size: int = 8, engine: ContainerEngine | None = None):
        self._engine = engine
        self._turns = asyncio.Semaphore(size)
        self._workspaces: dict[str, asyncio.Task[TaskWorkspace]] = {}  # task id -> workspace, least recently used first
        self._users: dict[str, int] = {}
        self._folders: tempfile.TemporaryDirectory[str] | None = None

    @asynccontextmanager
    async def workspace(self, task: Task) -> AsyncIterator[TaskWorkspace]:
        """Context manager: the workspace of a task, shared by all its episodes.

        Raises UserError for a task without an image or with an image that is not on this machine; SandboxDied when its
        container does not start or its files cannot be fetched.
        """
        self._users[task.id] = self._users.get(task.id, 0) + 1
        try:
            creation = self._workspaces.pop(task.id, None)
            if creation is None or (creation.done() and not _has_succeeded(creation)):
                creation = asyncio.create_task(self._create(task))
            self._workspaces[task.id] = creation
            yield await asyncio.shield(creation)
        finally:
            self._users[task.id] -= 1
            await self._evict()

    async def close(self) -> None:
        """Stops all containers and removes the folders on disk."""
        creations, self._workspaces = list(self._workspaces.values()), {}
        for creation in creations:
            creation.cancel()
        for workspace in await asyncio.gather(*creations, return_exceptions=True):
            if isinstance(workspace, TaskWorkspace):
                await workspace.pool.close()
        if self._folders is not None:
            await asyncio.to_thread(self._folders.cleanup)

    async def _create(self, task: Task) -> TaskWorkspace:
        if self._folders is None:
            _remove_leftovers()
            self._folders = tempfile.TemporaryDirectory(prefix=f"{FOLDER_PREFIX}{owner()}-", ignore_cleanup_errors=True)
        if self._engine is None:  # looked up once for all tasks
            self._engine = await asyncio.to_thread(find_engine)
        pool = await asyncio.to_thread(container_pool, task, engine=self._engine, turns=self._turns)
        base = Path(tempfile.mkdtemp(dir=self._folders.name))
        try:
            async with await pool.acquire({}, await pool.trees.get(task.repository)) as sandbox:
                await sandbox.export(base)
        except SandboxFileError as error:
            raise SandboxDied(f"the workspace of task {task.id} cannot be fetched from its image: {error}") from error
        return TaskWorkspace(pool, base)

    async def _evict(self) -> None:
        idle = [task_id for task_id in self._workspaces if not self._users[task_id]]
        for task_id in idle[: max(0, len(idle) - KEPT_WORKSPACES)]:
            creation = self._workspaces.pop(task_id)
            del self._users[task_id]
            if _has_succeeded(creation) and (base := creation.result().base) is not None:
                await asyncio.to_thread(shutil.rmtree, base, ignore_errors=True)


def _has_succeeded(creation: asyncio.Task[TaskWorkspace]) -> bool:
    return creation.done() and not creation.cancelled() and creation.exception() is None


def _remove_leftovers() -> None:
    """Removes the folders of processes of this machine that ended without removing them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        if has_ended(folder.name.removeprefix(FOLDER_PREFIX).rpartition("-")[0]):
            shutil.rmtree(folder, ignore_errors=True)
