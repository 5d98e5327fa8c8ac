"""Sandboxes by the dozen: at most `size` in use, a few always ready."""

import asyncio
import itertools
import os
import socket
import tempfile
import weakref
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.sandbox import backend as backends
from composer_jax.sandbox.limits import Limits
from composer_jax.sandbox.sandbox import Sandbox, SandboxDied
from composer_jax.sandbox.spawner import Spawner
from composer_jax.sandbox.tree import Tree, copy_tree

WARM = 8  # most empty sandboxes kept ready: some 3 MB and no CPU time each
READY_S = 20.0  # longest a sandbox may take to start; it needs some milliseconds
ATTEMPTS = 3  # a failed start is tried twice more


class SandboxPool:
    """Hands out fresh sandboxes. Construct it anywhere, use it from one event loop at a time.

    Raises UserError, from the constructor, when this machine cannot build the sandboxes asked for; RuntimeWarning
    for the backend that isolates nothing.
    """

    def __init__(self, limits: Limits | None = None, backend: str = "auto", size: int = 64):
        if size < 1:
            raise UserError(f"sandbox pool size is {size}; it must be at least 1")
        self.limits = limits or Limits()
        self.size = size
        self._trees = tempfile.TemporaryDirectory(prefix="composer-trees-")
        os.chmod(self._trees.name, 0o755)
        self._backend = backends.choose(backend, self._trees.name)
        self._numbers = itertools.count()
        self._warm: deque[Sandbox] = deque()
        self._used: set[Sandbox] = set()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._closed = False
        self._spawner = Spawner(self._backend, self.limits, self._trees.name)
        self._fill()

    @property
    def backend(self) -> str:
        """The backend in use: "bubblewrap" or "subprocess"."""
        return self._backend.name

    def tree(self, folder: Path) -> Tree:
        """A pristine copy of a folder for any number of sandboxes, copied once; a UserError if it cannot be."""
        name = str(next(self._numbers))
        copy_tree(folder, Path(self._trees.name, name))
        return Tree(base=name)

    async def acquire(self, files: Mapping[str, bytes | str], tree: Tree | None = None) -> Sandbox:
        """A fresh sandbox holding `files`, on top of `tree` if there is one; waits while `size` are in use. Give it
        back with its close().

        Raises SandboxDied when three attempts failed, SandboxFileError for a file that cannot be in a workspace.
        """
        while len(self._used) >= self.size and not self._closed:
            await self._wait()
        for attempt in range(ATTEMPTS):
            if self._closed:
                raise RuntimeError("the sandbox pool is closed; make another one")
            sandbox = self._take(tree)
            try:
                await sandbox.ready(READY_S)
                if files and tree is None:
                    await sandbox.write_all(files)
                for path, data in files.items() if tree is not None else ():
                    await sandbox.write(path, data)
                return sandbox
            except SandboxDied:
                self._drop_warm()  # whatever killed this one may have killed them all
                if attempt + 1 == ATTEMPTS:
                    raise
            except BaseException:
                sandbox.end("its files could not be written")
                raise
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """End every sandbox of this pool, used or not."""
        self.kill()

    def kill(self) -> None:
        """close() for callers outside a coroutine."""
        self._closed = True
        self._drop_warm()
        for sandbox in list(self._used):
            sandbox.end("its pool was closed")
        self._spawner.close()
        self._trees.cleanup()
        while self._waiting:
            self._wake()

    async def __aenter__(self) -> "SandboxPool":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kill()

    def _take(self, tree: Tree | None) -> Sandbox:
        """A started sandbox, perhaps not ready yet; its replacement is ordered in the same breath."""
        if not self._spawner.alive():
            self._replace_spawner()
        if tree is not None:
            sandbox = self._order(tree)
        else:
            sandbox = self._warm.popleft() if self._warm else self._order(Tree())
        self._used.add(sandbox)
        self._fill()
        return sandbox

    def _fill(self) -> None:
        while len(self._warm) < min(WARM, self.size - len(self._used)):
            self._warm.append(self._order(Tree()))

    def _order(self, tree: Tree) -> Sandbox:
        name = str(next(self._numbers))
        try:
            channel = self._spawner.spawn(name, tree)
        except OSError:  # it has just died
            self._replace_spawner()
            channel = self._spawner.spawn(name, tree)
        return Sandbox(name, channel, tree, self)

    def frozen(self, sandbox: Sandbox) -> Tree:
        """What the sandbox's workspace holds; its worker is ended. (Sandbox.snapshot calls this.)"""
        spawner, layer = self._spawner, sandbox.name
        spawner.freeze(layer)
        tree = Tree(sandbox.tree, layer=layer)
        weakref.finalize(tree, spawner.drop, layer)
        return tree

    def restarted(self, sandbox: Sandbox, tree: Tree) -> tuple[str, socket.socket]:
        """Name and line of a new worker for the sandbox. (Sandbox.restore calls this.)"""
        self._spawner.kill(sandbox.name)
        name = str(next(self._numbers))
        return name, self._spawner.spawn(name, tree)

    def _replace_spawner(self) -> None:
        self._drop_warm()
        self._spawner.close()
        self._spawner = Spawner(self._backend, self.limits, self._trees.name)

    def _drop_warm(self) -> None:
        while self._warm:
            self._warm.pop().end("it was not needed")

    def released(self, sandbox: Sandbox) -> None:
        """A sandbox has ended. (Sandbox.end calls this.)"""
        self._spawner.kill(sandbox.name)
        if sandbox in self._used:
            self._used.remove(sandbox)
            self._wake()

    async def _wait(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._wake()  # the turn was ours: pass it on
            raise

    def _wake(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done() and not turn.get_loop().is_closed():
                turn.set_result(None)
                return
