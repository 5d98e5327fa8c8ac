"""The workspace of one episode: files that tools read and edit, and a sandbox in which commands run on them.

It consists of a base folder (the task's repository, an image, or nothing) and changes. Only the tools' edits and the
commands change files, and the changes are fetched after every command, so reading and editing need no sandbox. A
sandbox is acquired to run code, replaced when it dies, and not used for a run whose result on the same files is cached.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from composer_jax.agent.base_folder import Kind, is_vcs_path, open_base_folder
from composer_jax.agent.search.index import Hit, SearchIndex, search
from composer_jax.agent.todos import Todo
from composer_jax.errors import UserError
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
from composer_jax.tasks.result_cache import EpisodeCache, fingerprint_bytes, result_key
from composer_jax.tasks.retry import apply_layers, retry_if_sandbox_dies
from composer_jax.tasks.task import Task

MAX_CHANGED = 32 << 20  # bytes of all changed files together; half of the sandbox's workspace if that is less
_NEW_FOLDER = Change("folder", mode=0o755)


class Workspace:
    """The files of an episode and the sandbox of its commands. Calls that change something need one caller at a time.

    Paths are relative and normal ("src/a.py"). Calls that fail raise SandboxFileError with one sentence.
    files: path -> bytes of the regular files now; read on access. changes: path -> every difference from the base
    folder; modify it with `write` and `delete` only.
    todos: the agent's plan. jobs_started: the number of commands that were started in the background.
    """

    def __init__(
        self,
        task: Task,
        pool: SandboxPool | None,
        cache: EpisodeCache | None = None,
        base: Path | None = None,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """base: the base folder, where it is not the task's repository but that of an image. waiting: the context in
        which the workspace waits for a sandbox of the pool (EpisodeClock.paused)."""
        self.files: Mapping[str, bytes] = _WorkspaceFiles(self)
        self.changes: dict[str, Change] = {path: Change("file", text.encode()) for path, text in task.files.items()}
        self.todos: tuple[Todo, ...] = ()
        self.jobs_started = 0
        self._task = task
        self._pool = pool
        self._cache = cache
        self._waiting = waiting
        self._base = open_base_folder(base or task.repository)
        self._room = min(MAX_CHANGED, pool.limits.workspace_mb << 19) if pool else MAX_CHANGED
        self.roots: tuple[str, ...] = pool.workspace_paths if pool else WORKSPACE_PATHS
        """The absolute paths under which commands see the workspace."""
        if pool and pool.capabilities.has_writable_system:  # a key holds the changes of the workspace only
            self._cache = None
        self._sandbox_lock = asyncio.Lock()
        self._sandbox: Sandbox | None = None
        self._shell_in: Sandbox | None = None  # the sandbox of the persistent shell
        self._shell_was_lost = False  # since the last shell command
        self._unsent: set[str] = set()  # paths that changed here and not yet in the sandbox
        self._totals: _ChangeTotals | None = None  # None: not computed
        self._changed_index: tuple[dict[str, Change], SearchIndex] = ({}, SearchIndex(()))

    # Reading.

    async def prepare(self) -> None:
        """Lists the base folder in a thread and fetches the changes of background jobs; every tool call starts so."""
        await self._base.entries.get()
        if self._sandbox is None or not self._sandbox.jobs:
            return
        async with self._sandbox_lock:
            try:
                sandbox = await self._current_sandbox()
                self._store_changes(await sandbox.changes())
            except (SandboxDied, SandboxFileError):  # the next command acquires a new sandbox
                await self.close()

    def kind(self, path: str) -> Kind | None:
        """The kind of the entry at a path; None if there is none, or if only a link leads to it."""
        change = self.changes.get(path)
        if path in self._change_totals().folders:
            return "folder"
        if change is not None:
            return None if change.kind == "gone" else change.kind
        entry = None if self._is_hidden(path) else self._base.entry(path)
        return entry.kind if entry else None

    def size(self, path: str) -> int:
        """The size of a file in bytes."""
        change = self.changes.get(path)
        return len(change.data) if change else self._base.entries.get_here()[path].size

    def mode(self, path: str) -> int:
        """The permission bits of a file."""
        change = self.changes.get(path)
        return change.mode if change else self._base.entries.get_here()[path].mode

    def target(self, link: str) -> str:
        """The target of a link."""
        change = self.changes.get(link)
        return os.fsdecode(change.data if change else self._base.entries.get_here()[link].data)

    def paths(self, *kinds: Kind) -> list[str]:
        """The paths of all entries of these kinds, sorted."""
        kind_of = {path: change.kind for path, change in self.changes.items() if change.kind != "gone"}
        kind_of.update(dict.fromkeys(self._change_totals().folders, "folder"))
        entries = self._base.entries.get_here()
        hiding = any(path in entries for path in self.changes)
        for path, entry in entries.items():
            if path not in kind_of and path not in self.changes and not (hiding and self._is_hidden(path)):
                kind_of[path] = entry.kind
        return sorted(path for path, kind in kind_of.items() if kind in kinds)

    # Changing and running.

    def write(self, path: str, data: bytes, mode: int | None = None) -> None:
        """Creates or replaces a file and its parent folders. mode: permission bits; None: unchanged, 0o644 if new."""
        for folder in _parents(path):
            if self.kind(folder) in ("file", "link"):
                raise SandboxFileError(f"{folder} is a {self.kind(folder)}, not a folder")
        kind = self.kind(path)
        if kind in ("folder", "link"):
            raise SandboxFileError(f"{path} is a {kind}, not a file")
        replaced = self.changes.get(path)
        if self._change_totals().size - (len(replaced.data) if replaced else 0) + len(data) > self._room:
            raise SandboxFileError(f"no space left for {path}: all changes together may have {self._room} bytes")
        if mode is None:
            mode = self.mode(path) if kind == "file" else 0o644
        change = Change("file", data, mode)
        self._set_change(path, None if self._equals_base(path, change) else change)

    def delete(self, path: str) -> None:
        """Removes a file or a link."""
        kind = self.kind(path)
        if kind not in ("file", "link"):
            raise SandboxFileError(f"{path} is a folder, not a file" if kind else f"{path} does not exist")
        is_in_base = not self._is_hidden(path) and self._base.entry(path)
        self._set_change(path, GONE if is_in_base else None)

    def replace(self, files: Mapping[str, tuple[bytes, int | None] | None]) -> None:
        """Writes (content, mode) and deletes (None) several files; all of them, or none if one fails."""
        before, unsent = dict(self.changes), set(self._unsent)
        try:
            for path in files:
                if files[path] is None:
                    self.delete(path)
            for path, content in files.items():
                if content is not None:
                    self.write(path, *content)
        except SandboxFileError:
            self.changes, self._unsent, self._totals = before, unsent, None
            raise

    async def run(self, argv: Sequence[str], timeout_s: float) -> RunResult:
        """The result of a command on the files, cached for the same command on the same files.

        A run is not cached once a command has left files in /tmp or /dev/shm: the key does not cover them.
        Raises SandboxKilled if the command kills its sandbox, SandboxDied in an outage (tasks/retry.py).
        """

        async def run_command() -> tuple[RunResult, bool]:
            return await self._in_sandbox(lambda sandbox: sandbox.run(argv, timeout_s=timeout_s))

        # The key does not cover what commands, a shell or the network left outside the workspace.
        has_left_files = self._sandbox is not None and not self._sandbox.tmp_is_empty
        if self._cache is None or self._task.network or self._shell_in is not None or has_left_files:
            return (await run_command())[0]
        return await self._cache.get(self._key(["run", *argv]), run_command)

    async def shell(self, command: str, timeout_s: float) -> tuple[RunResult, bool]:
        """Runs a command in the persistent shell, which keeps its working folder, variables and jobs.

        Also returns whether the shell is new because the sandbox of the previous one died. Raises what `run` does.
        """

        async def run_in_shell(sandbox: Sandbox) -> RunResult:
            self._shell_in = sandbox
            return await sandbox.shell(command, timeout_s=timeout_s)

        result, _ = await self._in_sandbox(run_in_shell)
        is_new, self._shell_was_lost = self._shell_was_lost, False
        return result, is_new

    async def search(self, query: str, under: str, limit: int) -> list[Hit]:
        """The best chunks of the current files for a query. under: a file or folder to search in; "" for all."""
        base = await self._base.index.get()
        changes = dict(self.changes)
        return await asyncio.to_thread(self._search, base, changes, query, under, limit)

    async def close(self) -> None:
        """Releases the sandbox, if one was acquired. Safe to call twice."""
        sandbox, self._sandbox = self._sandbox, None
        if self._shell_in is not None:
            self._shell_in, self._shell_was_lost = None, True
        if sandbox is not None:
            await sandbox.close()

    # The sandbox.

    async def _in_sandbox(self, command: Callable[[Sandbox], Awaitable[RunResult]]) -> tuple[RunResult, bool]:
        """(result, whether it may be cached): a run that hit a limit, changed anything or met files in /tmp may not."""

        async def run(sandbox: Sandbox) -> tuple[RunResult, dict[str, Change], bool]:
            began_clean = sandbox.tmp_is_empty
            try:
                return await command(sandbox), await sandbox.changes(), began_clean
            except SandboxDied:
                await self.close()
                raise

        async with self._sandbox_lock:
            try:
                result, after, began_clean = await retry_if_sandbox_dies(self._current_sandbox, run)
            except SandboxDied:
                await self.close()
                raise
            except SandboxFileError as error:
                await self.close()
                raise SandboxFileError(f"{error}; the workspace is again as it was before the command") from error
            sandbox, before = self._sandbox, self.changes
            assert sandbox is not None, "the command has just run there"
            self._store_changes(after)
            left_nothing = self.changes == before and began_clean and sandbox.tmp_is_empty and not sandbox.jobs
            return result, left_nothing and result.outcome in ("ok", "nonzero")

    async def _current_sandbox(self) -> Sandbox:
        if self._sandbox is not None and self._unsent:
            try:
                await self._send(self._sandbox)
            except (SandboxDied, SandboxFileError):  # a special file may be in the way, such as a pipe
                await self.close()
        if self._sandbox is None:
            if self._pool is None:
                raise UserError("this workspace has no sandboxes; give it a pool to run commands")
            with self._waiting():
                tree = await self._pool.trees.get(self._task.repository)
                packages = await self._pool.trees.get(self._task.packages)
                sandbox = await self._pool.acquire({}, tree, packages=packages, network=self._task.network)
            self._sandbox = await apply_layers(sandbox, *([self.changes] if self.changes else []))
        self._unsent.clear()
        return self._sandbox

    async def _send(self, sandbox: Sandbox) -> None:
        pending = {}
        for path in self._unsent:
            if self.kind(path) == "file":
                pending[path] = self.changes.get(path) or self._base_file(path)
            else:  # deleted; a folder in place of a file comes with its files
                pending[path] = GONE
        await sandbox.apply(pending)

    # The changes.

    def _store_changes(self, changes: Mapping[str, Change]) -> None:
        """Stores the changes of the sandbox in a canonical form: equal files give equal changes."""
        self._totals = None
        self.changes = dict(changes)
        holding = _ChangeTotals(changes).folders
        for path, change in changes.items():
            implied = change == _NEW_FOLDER and path in holding and self._base.entry(path) is None
            if implied or self._equals_base(path, change):
                del self.changes[path]

    def _set_change(self, path: str, change: Change | None) -> None:
        """Stores the change of a path, which is not yet in the sandbox; None: there is none any more."""
        totals = self._change_totals()
        if path in self.changes:
            totals.add(path, self.changes[path], -1)
        if change is None:
            self.changes.pop(path, None)
        else:
            self.changes[path] = change
            totals.add(path, change, 1)
        self._unsent.add(path)

    def _equals_base(self, path: str, change: Change) -> bool:
        """Whether a changed file equals that of the base folder."""
        entry = self._base.entry(path)
        if entry is None or (entry.kind, change.kind, entry.size) != ("file", "file", len(change.data)):
            return False
        if self._is_hidden(path) or (entry.mode ^ change.mode) & 0o100:
            return False
        return self._base.read(path) == change.data

    def _base_file(self, path: str) -> Change:
        return Change("file", self._base.read(path), self._base.entries.get_here()[path].mode)

    def _is_hidden(self, path: str) -> bool:
        return _is_hidden(path, self.changes)

    def _change_totals(self) -> "_ChangeTotals":
        if self._totals is None:
            self._totals = _ChangeTotals(self.changes)
        return self._totals

    def _key(self, command: Sequence[str]) -> str:
        task = self._task
        return result_key(
            fingerprint_bytes(self.changes), [*map(str, (task.repository, task.packages, task.image)), *command]
        )

    def _search(self, base: SearchIndex, changes: dict[str, Change], query: str, under: str, limit: int) -> list[Hit]:
        known, index = self._changed_index
        if known != changes:
            texts = {path: change.data for path, change in changes.items() if change.kind == "file"}
            files = {path: data for path, data in texts.items() if not is_vcs_path(path)}
            sizes = {path: len(data) for path, data in files.items()}
            index = SearchIndex.of(sizes, files.__getitem__)
            self._changed_index = changes, index
        hidden = [path for path in base.numbers if path in changes or _is_hidden(path, changes)] if changes else []
        return search(query, base, hidden, index, under=under, limit=limit)


class _ChangeTotals:
    """Sums over changes. size: the bytes of their data. folders: folder -> the number of present paths below it."""

    def __init__(self, changes: Mapping[str, Change]) -> None:
        self.size = 0
        self.folders = Counter[str]()
        for path, change in changes.items():
            self.add(path, change, 1)

    def add(self, path: str, change: Change, count: int) -> None:
        """Adds a change, or removes it (count -1)."""
        self.size += count * len(change.data)
        for folder in _parents(path) if change.kind != "gone" else ():
            self.folders[folder] += count
            if not self.folders[folder]:
                del self.folders[folder]


class _WorkspaceFiles(Mapping[str, bytes]):
    """The current regular files of a workspace."""

    def __init__(self, workspace: Workspace):
        self._workspace = workspace

    def __getitem__(self, path: str) -> bytes:
        if self._workspace.kind(path) != "file":
            raise KeyError(path)
        change = self._workspace.changes.get(path)
        return change.data if change else self._workspace._base_file(path).data

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and self._workspace.kind(path) == "file"

    def __iter__(self) -> Iterator[str]:
        return iter(self._workspace.paths("file"))

    def __len__(self) -> int:
        return len(self._workspace.paths("file"))


def _is_hidden(path: str, changes: Mapping[str, Change]) -> bool:
    """Whether changes hide the base folder's entry at a path: a folder above it was deleted or replaced."""
    return any(folder in changes and changes[folder].kind != "folder" for folder in _parents(path))


def _parents(path: str) -> Iterator[str]:
    """The parent folders of a path, nearest first."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path
