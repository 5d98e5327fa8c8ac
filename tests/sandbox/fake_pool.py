"""A test double of the SandboxPool protocol: files in a dict, and commands that are Python functions of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from composer_jax.sandbox import Capabilities, Change, RunResult, SandboxFileError, SandboxLimits
from composer_jax.sandbox.protocol import AsyncCloseable
from composer_jax.sandbox.tree_cache import TreeCache

Program = Callable[[dict[str, bytes], Sequence[str]], str]
"""Changes the files as the command would; returns what it prints."""

EVERYTHING = Capabilities(
    can_snapshot=True,
    can_fork=True,
    can_mount_packages=True,
    can_mount_tests=True,
    can_use_network=True,
    can_set_output_limit=True,
    has_writable_system=False,
)


class FakeSandbox(AsyncCloseable):
    """One workspace in memory. `commands` holds every argument list that was run."""

    def __init__(self, pool: "FakePool", name: str, files: Mapping[str, bytes]):
        self.name, self.limits, self.jobs, self.tmp_is_empty = name, pool.limits, 0, True
        self.commands: list[list[str]] = []
        self.is_closed = False
        self._pool, self._files = pool, dict(files)
        self._initial = dict(files)

    async def read(self, path: str) -> bytes:
        if path not in self._files:
            raise SandboxFileError(f"{path} does not exist")
        return self._files[path]

    async def write(self, path: str, data: bytes | str) -> None:
        await self.write_files({path: data})

    async def write_files(self, files: Mapping[str, bytes | str]) -> None:
        self._files |= {path: data.encode() if isinstance(data, str) else data for path, data in files.items()}

    async def run(
        self, argv: Sequence[str], *, timeout_s: float | None = None, stdin: bytes = b"", output_kb: int | None = None
    ) -> RunResult:
        self.commands.append(list(argv))
        return RunResult("ok", 0, self._pool.program(self._files, argv), "", 0.0, 0)

    async def shell(self, command: str, *, timeout_s: float | None = None) -> RunResult:
        return await self.run(["bash", "-c", command])

    async def changes(self) -> dict[str, Change]:
        gone = {path: Change("gone", mode=0) for path in self._initial.keys() - self._files.keys()}
        changed = {path: data for path, data in self._files.items() if self._initial.get(path) != data}
        return gone | {path: Change("file", data) for path, data in changed.items()}

    async def apply(self, changes: Mapping[str, Change]) -> None:
        for path, change in changes.items():
            self._files.pop(path, None)
            if change.kind == "file":
                self._files[path] = change.data

    async def snapshot(self) -> dict[str, bytes]:
        return dict(self._files)

    async def restore(self, tree: Mapping[str, bytes]) -> None:
        self._files = dict(tree)

    async def fork(self) -> "FakeSandbox":
        return await self._pool.acquire({}, self._files)

    async def close(self) -> None:
        self.is_closed = True


class FakePool(AsyncCloseable):
    """Makes FakeSandboxes and keeps them all in `sandboxes`. A tree is a dict, path -> content."""

    def __init__(self, program: Program, image: str | None = None, **capabilities: bool):
        self.program = program
        self.image = image
        self.limits = SandboxLimits()
        self.trees = TreeCache(self.tree)
        self.capabilities = replace(EVERYTHING, **capabilities)
        self.workspace_paths = ("/fake/workspace",)
        self.sandboxes: list[FakeSandbox] = []

    def tree(self, folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    async def acquire(
        self,
        files: Mapping[str, bytes | str],
        tree: Mapping[str, bytes] | None = None,
        *,
        packages: Mapping[str, bytes] | None = None,
        tests: Mapping[str, bytes] | None = None,
        network: bool = False,
        grading: bool = False,
        solution: Mapping[str, bytes] | None = None,
    ) -> FakeSandbox:
        sandbox = FakeSandbox(self, str(len(self.sandboxes)), tree or {})
        await sandbox.write_files(files)
        self.sandboxes.append(sandbox)
        return sandbox

    async def close(self) -> None:
        for sandbox in self.sandboxes:
            await sandbox.close()
