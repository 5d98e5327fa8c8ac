"""Sandboxes by the dozen: at most `size` in use, a few always ready."""

import asyncio
import itertools
from collections import deque
from collections.abc import Mapping

from composer_jax.errors import UserError
from composer_jax.sandbox import backend as backends
from composer_jax.sandbox.limits import Limits
from composer_jax.sandbox.sandbox import Sandbox, SandboxDied
from composer_jax.sandbox.spawner import Spawner

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
        self._backend = backends.choose(backend)
        self._numbers = itertools.count()
        self._warm: deque[Sandbox] = deque()
        self._used: set[Sandbox] = set()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._closed = False
        self._spawner = Spawner(self._backend, self.limits)
        self._fill()

    @property
    def backend(self) -> str:
        """The backend in use: "bubblewrap" or "subprocess"."""
        return self._backend.name

    async def acquire(self, files: Mapping[str, bytes | str]) -> Sandbox:
        """A fresh sandbox holding `files`; waits while `size` are in use. Give it back with its close().

        Raises SandboxDied when three attempts failed, SandboxFileError for a file that cannot be in a workspace.
        """
        while len(self._used) >= self.size and not self._closed:
            await self._wait()
        for attempt in range(ATTEMPTS):
            if self._closed:
                raise RuntimeError("the sandbox pool is closed; make another one")
            sandbox = self._take()
            try:
                await sandbox.ready(READY_S)
                if files:
                    await sandbox.restore(files)
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
        while self._waiting:
            self._wake()

    async def __aenter__(self) -> "SandboxPool":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kill()

    def _take(self) -> Sandbox:
        """A started sandbox, perhaps not ready yet; its replacement is ordered in the same breath."""
        if not self._spawner.alive():
            self._replace_spawner()
        sandbox = self._warm.popleft() if self._warm else self._order()
        self._used.add(sandbox)
        self._fill()
        return sandbox

    def _fill(self) -> None:
        while len(self._warm) < min(WARM, self.size - len(self._used)):
            self._warm.append(self._order())

    def _order(self) -> Sandbox:
        name = str(next(self._numbers))
        try:
            channel = self._spawner.spawn(name)
        except OSError:  # it has just died
            self._replace_spawner()
            channel = self._spawner.spawn(name)
        return Sandbox(name, channel, self.limits, self._released)

    def _replace_spawner(self) -> None:
        self._drop_warm()
        self._spawner.close()
        self._spawner = Spawner(self._backend, self.limits)

    def _drop_warm(self) -> None:
        while self._warm:
            self._warm.pop().end("it was not needed")

    def _released(self, sandbox: Sandbox) -> None:
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
