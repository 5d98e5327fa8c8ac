"""One container as a sandbox: commands, a persistent shell, files, and their changes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import tarfile
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, NoReturn

from composer_jax.errors import UserError
from composer_jax.sandbox.change import Change
from composer_jax.sandbox.container_changes import compare, pack, parse_diff, read_contents, unpack_into
from composer_jax.sandbox.container_shell import IDLE_PROCESSES, SHELL_ENDED, START, ContainerShell
from composer_jax.sandbox.engine import OWNER, kill_process, last_line, owner, read_all
from composer_jax.sandbox.errors import SandboxDied, SandboxFileError
from composer_jax.sandbox.inside.truncated_output import TruncatedOutput
from composer_jax.sandbox.limits import GRACE_S, MIB, REPLY_S
from composer_jax.sandbox.protocol import AsyncCloseable
from composer_jax.sandbox.run_result import RunResult, reject_argv, reject_shell_command

if TYPE_CHECKING:
    from composer_jax.sandbox.container_pool import ContainerPool

log = logging.getLogger(__name__)

MAX_USER_PROCESSES = 32768  # engines default to a million, which not every user may set; --pids-limit is the limit
END_OF_ARCHIVE = bytes(1024)
_IDLE = "while :; do sleep 3600; done"  # as process 1, a shell also reaps orphans
_RUN = 'timeout -s KILL "$0" "$@"; code=$?; kill -9 -1; exit $code'
_RUN_BESIDE_SHELL = 'exec timeout -s KILL "$0" "$@"'
_EVENTS = "/sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control"
_COUNTS = f"set -- /proc/[0-9]*; echo processes $#; cat {_EVENTS} 2>/dev/null; true"
# Kills also a process that survived _RUN by killing its shell. Prints how many processes the kernel killed for memory.
_KILL_ALL = f"kill -9 -1; {_COUNTS}"
_CLEAR = 'for path; do [ -d "$path" ] && [ ! -L "$path" ] && [ "$0" = folders ] || rm -rf "./$path"; done'


class Container(AsyncCloseable):
    """One container, made by ContainerPool.acquire(). Calls raise SandboxDied once it has ended."""

    def __init__(self, pool: ContainerPool, tree: Path | None):
        self.name = f"composer-{uuid.uuid4().hex[:12]}"
        self.limits = pool.limits
        self._pool, self._engine, self._tree = pool, pool.engine, tree
        self._lock = asyncio.Lock()
        self._removal: asyncio.Task[None] | None = None
        self._killed_for_memory = self._processes = 0
        self._shell: ContainerShell | None = None
        self.jobs = 0
        """Processes that were running beside the shell when its last command ended."""
        self.tmp_is_empty = False

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float | None = None,
        stdin: bytes = b"",
        output_kb: int | None = None,
    ) -> RunResult:
        """Runs a command in the workspace and waits until it ends.

        Processes that the command leaves running are killed, unless the shell is in use: its jobs would be killed, too.
        output_kb: KiB kept of each stream; None: SandboxLimits.output_kb.
        """
        if rejected := reject_argv(argv):
            return rejected
        seconds = self.limits.timeout_s if timeout_s is None else float(timeout_s)
        room = (output_kb or self.limits.output_kb) * 1024
        async with self._lock:
            start, shell = time.monotonic(), self._shell is not None
            words = ["sh", "-c", _RUN_BESIDE_SHELL if shell else _RUN, f"{seconds:.3f}", *argv]
            code, out, err = await self._exec(words, stdin, seconds + GRACE_S, room)
            took = time.monotonic() - start
            killed = await self._check_memory_kills(_COUNTS if shell else _KILL_ALL)
            if shell:  # processes that the command left running count as jobs
                self.jobs = max(0, self._processes - IDLE_PROCESSES)
        outcome = "ok" if code == 0 else "nonzero"
        if code != 0 and killed:
            outcome, code = "out_of_memory", 137
        elif code == 137 and took >= seconds:
            outcome, code = "timeout", 124
        return RunResult(outcome, code, out.text(), err.text(), took, out.dropped + err.dropped)

    async def shell(self, command: str, *, timeout_s: float | None = None) -> RunResult:
        """Runs a command in a shell of the container that keeps working folder, variables and background jobs.

        A command that exceeds its time limit is killed with the shell and all its jobs. When a shell has ended, by this
        or by `exit`, stderr says so and the next command starts in a new shell. stdin is empty.
        """
        if rejected := reject_shell_command(command):
            return rejected
        seconds = self.limits.timeout_s if timeout_s is None else float(timeout_s)
        async with self._lock:
            shell = await self._current_shell()
            start, ended = time.monotonic(), None
            try:
                async with asyncio.timeout(seconds):
                    ended = await shell.run(command)
            except TimeoutError:
                outcome, code = "timeout", 124
            except BaseException:
                await self.close()  # the command may have done anything by now
                raise
            took = time.monotonic() - start
            out, err = shell.output()
            if ended is not None:
                code, self.jobs = ended.code, ended.jobs
                outcome = "ok" if code == 0 else "nonzero"
            if ended is None or not ended.alive:
                await self._kill_shell()
                err.add(SHELL_ENDED.encode())
            if await self._check_memory_kills(_COUNTS) and outcome == "nonzero":
                outcome, code = "out_of_memory", 137
        return RunResult(outcome, code, out.text(), err.text(), took, out.dropped + err.dropped)

    async def export(self, folder: Path) -> None:
        """Writes files, folders and links of the workspace into an empty folder of the host.

        Files that commands may not read are left out. Raises SandboxFileError for more than SandboxLimits.workspace_mb.
        """
        room = self.limits.workspace_mb * MIB
        with tempfile.TemporaryFile() as packed:
            async with self._lock:
                words = ["exec", "--workdir", self._pool.workspace, self.name, "tar", "-cf", "-", "."]
                process = await self._engine.start(*words)
                errors = TruncatedOutput(MIB)
                reading = asyncio.ensure_future(read_all(process.stderr, errors))
                try:
                    async with asyncio.timeout(REPLY_S * 10):
                        while process.stdout and (data := await process.stdout.read(MIB)):
                            packed.write(data)
                            if packed.tell() > 2 * room:  # with the headers of many small files
                                raise SandboxFileError(f"the workspace holds more than {self.limits.workspace_mb} MiB")
                        await reading
                        await process.wait()
                except BaseException as error:
                    reading.cancel()
                    await asyncio.wait([reading])
                    await kill_process(process)
                    await self.close()
                    if isinstance(error, TimeoutError):
                        raise SandboxDied(f"container {self.name}: its files took too long to be fetched") from None
                    raise
            packed.seek(max(0, packed.seek(0, os.SEEK_END) - len(END_OF_ARCHIVE)))
            if packed.read() != END_OF_ARCHIVE:  # tar passes over unreadable files and finishes the archive
                raise SandboxDied(f"container {self.name}: its files cannot be fetched ({last_line(errors.text())})")
            packed.seek(0)
            unpacking = asyncio.ensure_future(asyncio.to_thread(unpack_into, packed, folder, room))
            try:
                await asyncio.shield(unpacking)
            except asyncio.CancelledError:  # a thread cannot be cancelled, and the caller removes the folder
                await asyncio.wait([unpacking])
                raise

    async def read(self, path: str) -> bytes:
        """Returns the content of a file; the path is relative to the workspace, or absolute in the container."""
        code, out, err = await self._exec(["cat", "--", path], b"", REPLY_S, self.limits.workspace_mb * MIB)
        if code or out.dropped:
            raise SandboxFileError(f"{path} cannot be read: {last_line(err.text()) if code else 'it is too large'}")
        return out.bytes()

    async def write(self, path: str, data: bytes | str) -> None:
        """Creates or replaces a file of the workspace, and creates the folders above it."""
        await self.write_files({path: data})

    async def write_files(self, files: Mapping[str, bytes | str]) -> None:
        """Creates or replaces several files at once."""
        contents = {path: data.encode() if isinstance(data, str) else bytes(data) for path, data in files.items()}
        await self.apply({path: Change("file", data) for path, data in contents.items()})

    async def apply(self, changes: Mapping[str, Change]) -> None:
        """Makes these changes in the workspace; what is in the way is removed."""
        for path in changes:
            parts = PurePosixPath(path).parts
            if not parts or parts[0] == "/" or ".." in parts or "\0" in path:
                raise SandboxFileError(f"{path!r} is not a path in the workspace")
        folders = [path for path, change in changes.items() if change.kind == "folder"]
        for kind, paths in (("folders", folders), ("others", changes.keys() - set(folders))):
            if paths:
                listed = b"".join(path.encode(errors="surrogateescape") + b"\0" for path in paths)
                await self.run_checked(["xargs", "-0", "sh", "-c", _CLEAR, kind], listed)
        await self.run_checked(["tar", "-xof", "-"], pack(changes))

    async def changes(self) -> dict[str, Change]:
        """Returns how the workspace differs from its image, or from the tree that was copied over it: path -> Change.

        Pipes, sockets, and names with a line break (ambiguous in what engines print) are left out. Jobs are paused
        meanwhile. Raises SandboxFileError when the changes, or all names of the workspace, are more than
        SandboxLimits.workspace_mb.
        """
        async with self._lock, self.paused_jobs():
            code, out, err = await self._run_engine(["diff", self.name])
            if code:
                raise SandboxDied(f"container {self.name}: its changes cannot be seen ({last_line(err.text())})")
            listed = await self._run_checked_locked(["find", ".", "-print0"])
            if out.dropped or listed.dropped:  # a path missing in a list would count as gone, or as unchanged
                raise SandboxFileError("the workspace has too many files: their names do not fit into one listing")
            present = {name.removeprefix("./") for name in os.fsdecode(listed.bytes()).split("\0")} - {"", "."}
            marks = parse_diff(os.fsdecode(out.bytes()), self._pool.workspace, self._pool.hide_history)
            paths = sorted(marks.keys() & present)
            contents = await read_contents(paths, self._run_checked_locked, self.limits.workspace_mb)
        return compare(marks, present, contents, self._tree)

    async def snapshot(self) -> NoReturn:
        """Raises UserError: engines freeze whole containers, not workspaces."""
        raise UserError("a container cannot be snapshotted; take its changes() and apply() them to a new one.")

    async def restore(self, tree: Path) -> NoReturn:
        """Raises UserError, as snapshot does."""
        raise UserError(f"a container cannot be restored to {tree}; acquire a new one with that tree.")

    async def fork(self) -> NoReturn:
        """Raises UserError, as snapshot does."""
        raise UserError("a container cannot be forked; take its changes() and apply() them to a new one.")

    async def close(self) -> None:
        """Kills the container and every process in it. A second call waits for the first."""
        if self._removal is None:
            self._removal = asyncio.create_task(self._remove())
        await asyncio.shield(self._removal)

    async def _remove(self) -> None:
        try:
            if self._shell is not None:  # engines wait until the output of the shell is read
                await self._shell.close()
            removal = await self._engine.start("rm", "--force", "--volumes", self.name)
            try:
                async with asyncio.timeout(REPLY_S):
                    _, message = await removal.communicate()
            except TimeoutError:
                await kill_process(removal)
                message = b"no answer"
            if removal.returncode:
                log.warning("container %s is still there: %s", self.name, last_line(message.decode(errors="replace")))
        finally:
            self._pool.on_sandbox_end(self)

    async def _current_shell(self) -> ContainerShell:
        if self._shell is None:
            self._require_open()
            words = ["exec", "--interactive", "--workdir", self._pool.workspace, self.name, *START]
            process = await self._engine.start(*words, stdin=subprocess.PIPE)
            self._shell, ended = ContainerShell(process, self.limits.output_kb * 1024), None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPLY_S):
                    ended = await self._shell.run(":")
            printed = self._shell.output()[1].text()  # printed by ~/.bashrc, so not part of the output of a command
            if ended is None or not ended.alive:
                await self.close()
                raise SandboxDied(f"container {self.name}: its ~/.bashrc lets no shell start ({last_line(printed)})")
        return self._shell

    async def _kill_shell(self) -> None:
        """Kills the shell and every process that it started."""
        await self._exec(["sh", "-c", _KILL_ALL], b"", REPLY_S, MIB)
        shell, self._shell, self.jobs = self._shell, None, 0
        if shell is not None:
            await shell.close()

    @contextlib.asynccontextmanager
    async def paused_jobs(self) -> AsyncIterator[None]:
        """Context in which the jobs of the shell are stopped. The caller holds the lock."""
        if not self.jobs:
            yield
            return
        await self._exec(["sh", "-c", "kill -STOP -1"], b"", REPLY_S, MIB)
        try:
            yield
        finally:
            if self._removal is None:
                await self._exec(["sh", "-c", "kill -CONT -1"], b"", REPLY_S, MIB)

    def _require_open(self) -> None:
        if self._removal is not None:
            raise SandboxDied(f"container {self.name} is gone: it was closed")

    async def _check_memory_kills(self, command: str) -> bool:
        """Whether the kernel killed a process for memory since the last call. Also updates the number of processes."""
        _, counts, _ = await self._exec(["sh", "-c", command], b"", REPLY_S, MIB)
        before, self._killed_for_memory = self._killed_for_memory, _sum_events(counts.text(), "oom_kill")
        self._processes = _sum_events(counts.text(), "processes")
        return self._killed_for_memory > before

    async def resolve_workspace(self) -> str:
        """Returns the path of the workspace without links; the pool's path where the container cannot print it."""
        _, out, _ = await self._exec(["sh", "-c", "pwd -P"], b"", REPLY_S, MIB)
        path = out.text().removesuffix("\n")
        return path if path.startswith("/") else self._pool.workspace

    async def start(self, network: bool, folders: Sequence[str] = ()) -> None:
        """Starts the container. folders: absolute paths of new ones. Raises SandboxDied when the engine cannot."""
        pool, limits = self._pool, self.limits
        words = ["run", "--detach", "--pull", "never", "--name", self.name, "--label", f"{OWNER}={owner()}"]
        words += [] if network else ["--network", "none"]
        words += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--hostname", "sandbox"]
        words += [word for name in pool.linux_capabilities for word in ("--cap-add", name)]
        words += ["--stop-signal", "KILL"]  # the shell, as process 1, ignores the default SIGTERM
        words += ["--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m", "--cpus", f"{pool.cpus}"]
        words += ["--pids-limit", f"{limits.processes}", "--ulimit", f"nofile={limits.open_files}:{limits.open_files}"]
        words += ["--ulimit", f"nproc={MAX_USER_PROCESSES}:{MAX_USER_PROCESSES}"]
        for folder in folders:
            words += ["--tmpfs", f"{folder}:rw,exec,mode=755"]  # without capabilities, root may not make folders in /
        for name, value in pool.environment.items():
            words += ["--env", f"{name}={value}"]
        words += ["--workdir", pool.workspace, "--entrypoint", "/bin/sh", pool.image, "-c", _IDLE]
        code, _, err = await self._run_engine(words)
        if code:
            raise SandboxDied(f"no container of {pool.image} could be started: {last_line(err.text())}")

    async def copy_in(self, folder: Path, target: str) -> None:
        """Copies what is in a folder of the host into a folder of the container."""
        with tempfile.TemporaryFile() as packed:
            with tarfile.open(fileobj=packed, mode="w") as tar:
                for child in sorted(folder.iterdir()):
                    tar.add(child, child.name)
            packed.seek(0)
            await self.run_checked(["tar", "-xof", "-", "-C", target], packed)

    async def run_checked(self, argv: Sequence[str], stdin: bytes | IO[bytes] = b"") -> None:
        """Runs a command of the harness in the workspace. Raises SandboxFileError when it fails."""
        async with self._lock:
            await self._run_checked_locked(argv, stdin)

    async def _run_checked_locked(
        self, argv: Sequence[str], stdin: bytes | IO[bytes] = b"", room: int = 0
    ) -> TruncatedOutput:
        """Runs a command of the harness in the workspace; returns its stdout. The caller holds the lock.

        room: bytes kept of each stream; 0: SandboxLimits.workspace_mb. Raises SandboxFileError when the command fails.
        """
        code, out, err = await self._exec(argv, stdin, REPLY_S * 10, room or self.limits.workspace_mb * MIB)
        if code:
            raise SandboxFileError(f"{argv[0]} failed in the container: {last_line(err.text())}")
        return out

    async def _exec(
        self, argv: Sequence[str], stdin: bytes | IO[bytes], timeout_s: float, room: int
    ) -> tuple[int, TruncatedOutput, TruncatedOutput]:
        """Runs a command in the container; exit code, stdout, stderr. Raises SandboxDied when the container is gone."""
        words = ["exec", "--interactive", "--workdir", self._pool.workspace, self.name, *argv]
        code, out, err = await self._run_engine(words, stdin, timeout_s, room)
        if code:
            _, state, _ = await self._run_engine(["inspect", "--format", "{{.State.Running}}", self.name])
            if state.text().strip() != "true":
                raise SandboxDied(f"container {self.name} died: {last_line(err.text())}")
        return code, out, err

    async def _run_engine(
        self, words: Sequence[str], stdin: bytes | IO[bytes] = b"", timeout_s: float = REPLY_S, room: int = 64 * MIB
    ) -> tuple[int, TruncatedOutput, TruncatedOutput]:
        self._require_open()
        with tempfile.TemporaryFile() as input_file:
            if isinstance(stdin, bytes):
                input_file.write(stdin)
                input_file.seek(0)
                stdin = input_file
            process = await self._engine.start(*words, stdin=stdin)
        out, err = TruncatedOutput(room), TruncatedOutput(room)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(read_all(process.stdout, out), read_all(process.stderr, err))
                return await process.wait(), out, err
        except BaseException as error:
            await kill_process(process)
            await self.close()
            if isinstance(error, TimeoutError):
                raise SandboxDied(f"container {self.name} died: no answer within {timeout_s:.0f} s") from None
            raise


def _sum_events(events: str, name: str) -> int:
    counts = [line.split() for line in events.splitlines()]
    return sum(int(words[1]) for words in counts if len(words) == 2 and words[0] == name and words[1].isdecimal())
