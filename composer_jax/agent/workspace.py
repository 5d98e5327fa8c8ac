"""The workspace of one episode: files that tools read and edit, and a sandbox in which commands run on them.

Nothing but our own edits and the commands we run changes the files, so what they hold is known on this side:
after a command they are read back. Reading and editing therefore ask no sandbox; one is taken when there is
code to run, replaced when it dies, and not taken at all for a run whose result on the very same files is
known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from composer_jax.sandbox import RunResult, Sandbox, SandboxDied, SandboxPool
from composer_jax.tasks.cache import ResultCache, result_key

ATTEMPTS = 3


class Workspace:
    """Files and where their code runs. For one caller at a time.

    files: what they hold now, relative path -> bytes; read it, but change it with `write`.
    """

    def __init__(self, files: Mapping[str, str], pool: SandboxPool, cache: ResultCache | None = None) -> None:
        self.files: dict[str, bytes] = {path: text.encode() for path, text in files.items()}
        self._pool = pool
        self._cache = cache
        self._sandbox: Sandbox | None = None
        self._unsent: set[str] = set()  # written here, not yet in the sandbox

    def write(self, path: str, data: bytes) -> None:
        """Creates or replaces a file."""
        self.files[path] = data
        self._unsent.add(path)

    async def run(self, argv: Sequence[str], timeout_s: float) -> RunResult:
        """Runs a command on the files, or tells what it gave when it ran on the very same files before.

        Raises SandboxDied when three sandboxes died of it in a row.
        """
        if self._cache is None:
            return (await self._run(argv, timeout_s))[0]
        key = result_key(self.files, ["run", *argv])
        return await self._cache.get(key, lambda: self._run(argv, timeout_s))

    async def close(self) -> None:
        """Gives the sandbox back, if one was taken. Safe to call twice."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.close()

    async def _run(self, argv: Sequence[str], timeout_s: float) -> tuple[RunResult, bool]:
        """The result, and whether it may be served again: not that of a run that hit a limit or left
        traces."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                sandbox = await self._current_sandbox()
                result = await sandbox.run(argv, timeout_s=timeout_s)
                after = await sandbox.read_all()
                break
            except SandboxDied:
                await self.close()
                if attempt == ATTEMPTS:
                    raise
        unchanged = after == self.files
        self.files = after
        return result, unchanged and result.outcome in ("ok", "nonzero")

    async def _current_sandbox(self) -> Sandbox:
        """A sandbox that holds the files as they are now."""
        if self._sandbox is None:
            self._sandbox = await self._pool.acquire(self.files)
        else:
            for path in sorted(self._unsent):
                await self._sandbox.write(path, self.files[path])
        self._unsent.clear()
        return self._sandbox
