"""The workspace of one episode: files that tools read and edit, and a sandbox in which commands run on them.

It is a pristine folder (the task's repository, or nothing) and what has changed in it. Nothing but our own edits and
the commands we run changes files, so what they hold is known on this side: after a command the changes are fetched.
Reading and editing therefore ask no sandbox; one is taken when there is code to run, replaced when it dies, and not
taken at all for a run whose result on the very same files is known.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path

from composer_jax.agent.base_folder import Kind, is_vcs_path, open_base_folder
from composer_jax.agent.search import Embedder, Hit, SearchIndex, search
from composer_jax.agent.todos import Todo
from composer_jax.sandbox import (
    GONE,
    WORKSPACE_PATHS,
    Change,
    RunResult,
    Sandbox,
    SandboxDied,
    SandboxFileError,
    SandboxPool,
)
from composer_jax.tasks.result_cache import ResultCache, fingerprint_bytes, result_key
from composer_jax.tasks.task import Task

ATTEMPTS = 3
MAX_CHANGED = 32 << 20  # bytes of all changed files together; and never more than half of a sandbox's room
_NEW_FOLDER = Change("folder", mode=0o755)


class Workspace:
    """Files and where their code runs. Calls that change something are for one caller at a time.

    Paths are relative and normal ("src/a.py"). Calls that cannot be done raise SandboxFileError with one sentence.
    files: what the regular files hold now, path -> bytes; read as they are asked for. changes: everything in which
    the workspace differs from what it held at first; read it, but change it with `write` and `delete`.
    todos: the agent's plan. jobs_started: how many commands were put in the background.
    """

    def __init__(
        self,
        task: Task,
        pool: SandboxPool | None,
        cache: ResultCache | None = None,
        embedder: Embedder | None = None,
        base: Path | None = None,
    ) -> None:
        """base: what the workspace holds at first, if that is not the task's repository but an image."""
        self.files: Mapping[str, bytes] = _Files(self)
        self.changes: dict[str, Change] = {path: Change("file", text.encode()) for path, text in task.files.items()}
        self.todos: tuple[Todo, ...] = ()
        self.jobs_started = 0
        self._task = task
        self._pool = pool
        self._cache = cache
        self._embedder = embedder
        self._base = open_base_folder(base or task.repository)
        self._room = min(MAX_CHANGED, pool.limits.workspace_mb << 19) if pool else MAX_CHANGED
        self.roots: tuple[str, ...] = pool.workspace_paths if pool else WORKSPACE_PATHS
        """Where commands see the workspace, by each of its names."""
        if pool and pool.capabilities.has_writable_system:  # a key holds the changes of the workspace only
            self._cache = None
        self._turn = asyncio.Lock()  # of the sandbox
        self._sandbox: Sandbox | None = None
        self._shell_in: Sandbox | None = None  # the sandbox in which the shell has been used
        self._shell_was_lost = False  # since the last command in it
        self._unsent: set[str] = set()  # changed here, not yet in the sandbox
        self._folders: set[str] | None = None  # folders that hold changes; None: to be found out
        self._changed_index: tuple[dict[str, Change], SearchIndex] = ({}, SearchIndex((), None))

    # What is there.

    async def prepare(self) -> None:
        """Lists the repository away from the event loop, and fetches what background jobs changed. Every tool call
        starts with it."""
        await self._base.entries.get()
        if self._sandbox is None or not self._sandbox.jobs:
            return
        async with self._turn:
            try:
                sandbox = await self._current_sandbox()
                self._take_over(await sandbox.changes())
            except (SandboxDied, SandboxFileError):  # the next command gets a new one
                await self.close()

    def kind(self, path: str) -> Kind | None:
        """What is at a path; None if nothing is, or if it could be reached through a link only."""
        change = self.changes.get(path)
        if path in self._changed_folders():
            return "folder"
        if change is not None:
            return None if change.kind == "gone" else change.kind
        entry = None if self._covered(path) else self._base.entry(path)
        return entry.kind if entry else None

    def size(self, path: str) -> int:
        """Bytes of a file."""
        change = self.changes.get(path)
        return len(change.data) if change else self._base.entries.get_here()[path].size

    def mode(self, path: str) -> int:
        """Permission bits of a file."""
        return self.changes[path].mode if path in self.changes else self._base.entry(path).mode

    def target(self, link: str) -> str:
        """Where a link leads."""
        change = self.changes.get(link)
        return os.fsdecode(change.data if change else self._base.entries.get_here()[link].data)

    def paths(self, *kinds: Kind) -> list[str]:
        """Everything of these kinds, sorted."""
        found = {path: change.kind for path, change in self.changes.items() if change.kind != "gone"}
        found.update(dict.fromkeys(self._changed_folders(), "folder"))
        entries = self._base.entries.get_here()
        hiding = any(path in entries for path in self.changes)
        for path, entry in entries.items():
            if path not in found and path not in self.changes and not (hiding and self._covered(path)):
                found[path] = entry.kind
        return sorted(path for path, kind in found.items() if kind in kinds)

    # What changes it.

    def write(self, path: str, data: bytes, mode: int | None = None) -> None:
        """Creates or replaces a file, with the folders above it. mode: permission bits; None: as they are, or 0o644."""
        for folder in _above(path):
            if self.kind(folder) in ("file", "link"):
                raise SandboxFileError(f"{folder} is a {self.kind(folder)}, not a folder")
        kind = self.kind(path)
        if kind in ("folder", "link"):
            raise SandboxFileError(f"{path} is a {kind}, not a file")
        if sum(len(change.data) for known, change in self.changes.items() if known != path) + len(data) > self._room:
            raise SandboxFileError(f"no space left for {path}: all changes together may have {self._room} bytes")
        if mode is None:
            mode = self.mode(path) if kind == "file" else 0o644
        self.changes[path] = Change("file", data, mode)
        if self._equals_base(path, self.changes[path]):
            del self.changes[path]
        self._changed(path)

    def delete(self, path: str) -> None:
        """Removes a file or a link."""
        kind = self.kind(path)
        if kind not in ("file", "link"):
            raise SandboxFileError(f"{path} is a folder, not a file" if kind else f"{path} does not exist")
        self.changes.pop(path, None)
        if not self._covered(path) and self._base.entry(path):
            self.changes[path] = GONE
        self._changed(path)

    def replace(self, files: Mapping[str, tuple[bytes, int | None] | None]) -> None:
        """Writes (content, mode) and deletes (None) several files: all of them, or none if one cannot be."""
        before, unsent = dict(self.changes), set(self._unsent)
        try:
            for path in files:
                if files[path] is None:
                    self.delete(path)
            for path, written in files.items():
                if written is not None:
                    self.write(path, *written)
        except SandboxFileError:
            self.changes, self._unsent, self._folders = before, unsent, None
            raise

    async def run(self, argv: Sequence[str], timeout_s: float) -> RunResult:
        """Runs a command on the files, or tells what it gave when it ran on the very same files before.

        Raises SandboxDied when three sandboxes died of it in a row.
        """

        async def once() -> tuple[RunResult, bool]:
            return await self._in_sandbox(lambda sandbox: sandbox.run(argv, timeout_s=timeout_s))

        # What a shell or the network left elsewhere is no part of the key.
        if self._cache is None or self._task.network or self._shell_in is not None:
            return (await once())[0]
        return await self._cache.get(self._key(["run", *argv]), once)

    async def shell(self, command: str, timeout_s: float) -> tuple[RunResult, bool]:
        """Runs a command in the persistent shell, whose working folder, variables and jobs stay.

        Also returns whether the shell is a new one because the sandbox of the last one has gone. Raises SandboxDied
        when three sandboxes died in a row.
        """

        async def type_in(sandbox: Sandbox) -> RunResult:
            self._shell_in = sandbox
            return await sandbox.shell(command, timeout_s=timeout_s)

        result, _ = await self._in_sandbox(type_in)
        is_new, self._shell_was_lost = self._shell_was_lost, False
        return result, is_new

    async def search(self, query: str, under: str, limit: int) -> list[Hit]:
        """The best places for a query, of the files as they are now; `under`: in this file or folder ("": all)."""
        base = await self._base.index(self._embedder).get()
        changes = dict(self.changes)
        return await asyncio.to_thread(self._search, base, changes, query, under, limit)

    async def close(self) -> None:
        """Gives the sandbox back, if one was taken. Safe to call twice."""
        sandbox, self._sandbox = self._sandbox, None
        if self._shell_in is not None:
            self._shell_in, self._shell_was_lost = None, True
        if sandbox is not None:
            await sandbox.close()

    # The sandbox.

    async def _in_sandbox(self, command: Callable[[Sandbox], Awaitable[RunResult]]) -> tuple[RunResult, bool]:
        """The result, and whether it may be served again: not that of a run that hit a limit or left traces."""
        async with self._turn:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    sandbox = await self._current_sandbox()
                    result = await command(sandbox)
                    after = await sandbox.changes()
                    break
                except SandboxDied:
                    await self.close()
                    if attempt == ATTEMPTS:
                        raise
                except SandboxFileError as error:
                    await self.close()
                    raise SandboxFileError(f"{error}; the workspace is again as it was before the command") from error
            before = self.changes
            self._take_over(after)
            return result, self.changes == before and not sandbox.jobs and result.outcome in ("ok", "nonzero")

    async def _current_sandbox(self) -> Sandbox:
        """A sandbox that holds the files as they are now."""
        if self._sandbox is not None and self._unsent:
            try:
                await self._send(self._sandbox)
            except SandboxFileError:  # something is in the way that we do not know of, such as a pipe
                await self.close()
        if self._sandbox is None:
            tree = await self._pool.trees.get(self._task.repository)
            packages = await self._pool.trees.get(self._task.packages)
            self._sandbox = await self._pool.acquire({}, tree, packages=packages, network=self._task.network)
            if self.changes:
                await self._sandbox.apply(self.changes)
        self._unsent.clear()
        return self._sandbox

    async def _send(self, sandbox: Sandbox) -> None:
        now = {}
        for path in self._unsent:
            if self.kind(path) == "file":
                now[path] = self.changes.get(path) or self._first(path)
            else:  # nothing; or where there was a file there is a folder, which comes with what is in it
                now[path] = GONE
        await sandbox.apply(now)

    # What is known of it.

    def _take_over(self, changes: Mapping[str, Change]) -> None:
        """What the sandbox says has changed, in the fewest words: the same files are the same changes."""
        self._folders = None
        self.changes = dict(changes)
        holding = self._changed_folders()
        for path, change in changes.items():
            implied = change == _NEW_FOLDER and path in holding and self._base.entry(path) is None
            if implied or self._equals_base(path, change):
                del self.changes[path]

    def _changed(self, path: str) -> None:
        self._unsent.add(path)
        self._folders = None

    def _equals_base(self, path: str, change: Change) -> bool:
        """Whether a changed file is what it was at first."""
        entry = self._base.entry(path)
        if entry is None or (entry.kind, change.kind, entry.size) != ("file", "file", len(change.data)):
            return False
        if self._covered(path) or (entry.mode ^ change.mode) & 0o100:
            return False
        return self._base.read(path) == change.data

    def _first(self, path: str) -> Change:
        """A file of the pristine folder."""
        return Change("file", self._base.read(path), self._base.entry(path).mode)

    def _covered(self, path: str) -> bool:
        return _covered(path, self.changes)

    def _changed_folders(self) -> set[str]:
        if self._folders is None:
            there = [path for path, change in self.changes.items() if change.kind != "gone"]
            self._folders = {folder for path in there for folder in _above(path)}
        return self._folders

    def _key(self, command: Sequence[str]) -> str:
        task = self._task
        return result_key(
            fingerprint_bytes(self.changes), [*map(str, (task.repository, task.packages, task.image)), *command]
        )

    def _search(self, base: SearchIndex, changes: dict[str, Change], query: str, under: str, limit: int) -> list[Hit]:
        known, index = self._changed_index
        if known != changes:
            found = ((path, change) for path, change in changes.items() if change.kind == "file")
            files = {path: change.data for path, change in found if not is_vcs_path(path)}
            sizes = {path: len(data) for path, data in files.items()}
            index = SearchIndex.of(sizes, files.__getitem__, self._embedder)
            self._changed_index = changes, index
        hidden = [path for path in base.numbers if path in changes or _covered(path, changes)] if changes else []
        return search(query, base, hidden, index, self._embedder, under=under, limit=limit)


class _Files(Mapping[str, bytes]):
    """The regular files of a workspace as they are now."""

    def __init__(self, workspace: Workspace):
        self._workspace = workspace

    def __getitem__(self, path: str) -> bytes:
        if self._workspace.kind(path) != "file":
            raise KeyError(path)
        change = self._workspace.changes.get(path)
        return change.data if change else self._workspace._first(path).data

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and self._workspace.kind(path) == "file"

    def __iter__(self) -> Iterator[str]:
        return iter(self._workspace.paths("file"))

    def __len__(self) -> int:
        return len(self._workspace.paths("file"))


def _covered(path: str, changes: Mapping[str, Change]) -> bool:
    """Whether the pristine folder has no say at a path, because something above it went or is no folder now."""
    return any(folder in changes and changes[folder].kind != "folder" for folder in _above(path))


def _above(path: str) -> Iterator[str]:
    """The folders above a path, the nearest first."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path
