"""Containers for the episodes of tasks that need an image, and what their workspaces hold at first."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from composer_jax.sandbox import SandboxDied, SandboxFileError, SandboxPool
from composer_jax.sandbox.engine import Engine, find_engine, has_ended, owner
from composer_jax.tasks.images.containers import container_pool
from composer_jax.tasks.task import Task

KEPT_WORKSPACES = 8  # tasks whose workspaces stay on disk when no episode uses them any more
FOLDER_PREFIX = "composer-images-"


@dataclass(frozen=True)
class TaskWorkspace:
    """Where a task is played. pool: of its sandboxes. base: the folder of the host that holds what its workspace holds
    at first, but for the task's own files; None: nothing."""

    pool: SandboxPool
    base: Path | None


class ImagePools:
    """The places of tasks with an image, each made when it is first asked for. Use it from one event loop.

    size: containers in use at once, of all images together. engine: None: whichever works.
    """

    def __init__(self, size: int = 8, engine: Engine | None = None):
        self._engine = engine
        self._turns = asyncio.Semaphore(size)
        self._places: dict[str, asyncio.Task[TaskWorkspace]] = {}  # the least recently used first
        self._users: dict[str, int] = {}
        self._folders: tempfile.TemporaryDirectory | None = None

    @asynccontextmanager
    async def workspace(self, task: Task) -> AsyncIterator[TaskWorkspace]:
        """Context: the place of a task, the same for all its episodes.

        Raises UserError for a task without an image, or with one that is not there; SandboxDied where its container
        does not start, or its files cannot be fetched.
        """
        self._users[task.id] = self._users.get(task.id, 0) + 1
        try:
            making = self._places.pop(task.id, None)
            if making is None or (making.done() and not _is_made(making)):
                making = asyncio.create_task(self._made(task))
            self._places[task.id] = making
            yield await asyncio.shield(making)
        finally:
            self._users[task.id] -= 1
            await self._forget()

    async def close(self) -> None:
        """Ends all containers and removes what is on disk."""
        makings, self._places = list(self._places.values()), {}
        for making in makings:
            making.cancel()
        for place in await asyncio.gather(*makings, return_exceptions=True):
            if isinstance(place, TaskWorkspace):
                await place.pool.close()
        if self._folders is not None:
            await asyncio.to_thread(self._folders.cleanup)

    async def __aenter__(self) -> ImagePools:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _made(self, task: Task) -> TaskWorkspace:
        if self._folders is None:
            _remove_leftovers()
            self._folders = tempfile.TemporaryDirectory(prefix=f"{FOLDER_PREFIX}{owner()}-", ignore_cleanup_errors=True)
        if self._engine is None:  # asked once, not for each task
            self._engine = await asyncio.to_thread(find_engine)
        pool = await asyncio.to_thread(container_pool, task, engine=self._engine, turns=self._turns)
        base = Path(tempfile.mkdtemp(dir=self._folders.name))
        try:
            async with await pool.acquire({}, await pool.trees.get(task.repository)) as sandbox:
                await sandbox.export(base)
        except SandboxFileError as error:
            raise SandboxDied(f"the workspace of task {task.id} cannot be fetched from its image: {error}") from error
        return TaskWorkspace(pool, base)

    async def _forget(self) -> None:
        idle = [name for name in self._places if not self._users[name]]
        for name in idle[: max(0, len(idle) - KEPT_WORKSPACES)]:
            making = self._places.pop(name)
            del self._users[name]
            if _is_made(making):
                await asyncio.to_thread(shutil.rmtree, making.result().base, ignore_errors=True)


def _is_made(making: asyncio.Task[TaskWorkspace]) -> bool:
    return making.done() and not making.cancelled() and making.exception() is None


def _remove_leftovers() -> None:
    """Folders whose owners, processes of this machine, ended without removing them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        if has_ended(folder.name.removeprefix(FOLDER_PREFIX).rpartition("-")[0]):
            shutil.rmtree(folder, ignore_errors=True)
