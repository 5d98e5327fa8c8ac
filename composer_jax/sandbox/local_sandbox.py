"""The host's side of one local sandbox."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from composer_jax.errors import UserError
from composer_jax.sandbox.change import Change
from composer_jax.sandbox.errors import SandboxDied, SandboxFileError
from composer_jax.sandbox.inside import frames
from composer_jax.sandbox.inside.truncated_output import join_truncated
from composer_jax.sandbox.limits import GRACE_S, MIB, REPLY_S
from composer_jax.sandbox.protocol import AsyncCloseable
from composer_jax.sandbox.run_result import RunResult, reject_argv, reject_shell_command
from composer_jax.sandbox.tree import MountPlan, Tree

LAST_CALL_S = 1.0
MAX_HEADER = 16 * MIB  # of a reply; the worker is not trusted with the host's memory


class LocalSandbox(AsyncCloseable):
    """One isolated workspace with a worker process inside; made by LocalSandboxPool.acquire().

    Calls may overlap; they run one after the other. Cancelling a call ends the sandbox, whose state would be unknown.
    Every call raises SandboxDied once the sandbox has ended.
    """

    def __init__(self, name: str, channel: socket.socket, plan: MountPlan):
        self.name = name
        self.plan = plan
        self.limits = plan.tree.pool.limits
        self._channel = channel
        self._pool = plan.tree.pool
        self._changes: dict[str, Change] = {}  # that the worker has reported so far
        self.jobs = 0
        """Processes that were running beside the shell when its last command ended."""
        self.tmp_is_empty = True
        """Whether /tmp and /dev/shm held no files at the last call of `changes`; False without isolation."""
        self._worker: Literal["ready", "starting", "none"] = "ready"  # starting: not ready yet
        self._turn = asyncio.Lock()
        self._busy = False  # a call waits for an answer, at most until the alarm
        self._alarm: asyncio.TimerHandle
        self._end: str | None = None  # why the sandbox has ended

    async def read(self, path: str) -> bytes:
        """Returns the content of a file. Paths are relative to the workspace, or absolute below /workspace."""
        return (await self._call({"op": "read", "path": path}))[1]

    async def write(self, path: str, data: bytes | str) -> None:
        """Creates or replaces a file, and creates the folders above it."""
        await self._call({"op": "write", "path": path}, _encode(data))

    async def delete(self, path: str) -> None:
        """Removes one file."""
        await self._call({"op": "delete", "path": path})

    async def list(self) -> list[str]:
        """Returns the relative paths of all regular files, sorted."""
        return (await self._call({"op": "list"}))[0]["paths"]

    async def run(
        self, argv: Sequence[str], *, timeout_s: float | None = None, stdin: bytes = b"", output_kb: int | None = None
    ) -> RunResult:
        """Runs a command in /workspace and waits until it ends; `["python", ...]` needs no interpreter start.

        Processes that the command leaves running are killed. `timeout_s` defaults to SandboxLimits.timeout_s. Raises
        UserError for an `output_kb`: the worker truncates output to SandboxLimits.output_kb.
        """
        if output_kb is not None:
            raise UserError("a local sandbox has no output limit per command; set SandboxLimits.output_kb of its pool.")
        if rejected := reject_argv(argv):
            return rejected
        seconds = self.limits.timeout_s if timeout_s is None else float(timeout_s)
        request = {"op": "run", "argv": list(argv), "timeout_s": seconds}
        return _parse_result(*await self._call(request, stdin, seconds + GRACE_S))

    async def shell(self, command: str, *, timeout_s: float | None = None) -> RunResult:
        """Runs a command in the persistent bash of the sandbox, which keeps working folder, variables and jobs.

        A command that exceeds a limit is killed with everything it started; the shell goes on. When the shell ends
        (`exit`), stderr says so and the next command starts in a new one, as after snapshot() and restore(). stdin is
        empty.
        `timeout_s` defaults to SandboxLimits.timeout_s.
        """
        if rejected := reject_shell_command(command):
            return rejected
        seconds = self.limits.timeout_s if timeout_s is None else float(timeout_s)
        request = {"op": "shell", "command": command, "timeout_s": seconds}
        header, body = await self._call(request, timeout_s=seconds + GRACE_S)
        self.jobs = header["jobs"]
        return _parse_result(header, body)

    async def write_files(self, files: Mapping[str, bytes | str]) -> None:
        """Creates or replaces several files at once."""
        contents = {path: _encode(data) for path, data in files.items()}
        index = [(path, len(data)) for path, data in contents.items()]
        await self._call({"op": "write_files", "files": index}, b"".join(contents.values()))

    async def changes(self) -> dict[str, Change]:
        """Returns how the workspace differs from the folder it was made from, or from an empty one: path -> Change.

        The time grows with what changed since the last call. Raises SandboxFileError for more than
        SandboxLimits.workspace_mb.
        """
        patience_s = REPLY_S + self.limits.workspace_mb / 10  # a tenth of a second for each MiB
        header, body = await self._call({"op": "changes"}, timeout_s=patience_s)
        self.tmp_is_empty = header["tmp_is_empty"]
        start = 0
        for path in header["same"]:
            self._changes.pop(path, None)
        for path, kind, mode, length in header["changes"]:
            self._changes[path] = Change(kind, body[start : start + length], mode)
            start += length
        return dict(sorted(self._changes.items()))

    async def apply(self, changes: Mapping[str, Change]) -> None:
        """Makes these changes in the workspace; what is in the way is removed."""
        ordered = sorted(changes.items())
        index = [(path, change.kind, change.mode, len(change.data)) for path, change in ordered]
        await self._call({"op": "apply", "changes": index}, b"".join(change.data for _, change in ordered))

    async def snapshot(self) -> Tree:
        """Returns the state of the workspace as a tree for any number of sandboxes, in a time independent of its size.

        The sandbox continues with a new worker, so /tmp is empty afterwards. Raises UserError for more snapshots on top
        of each other than the kernel can mount (tree.MAX_DEPTH).
        """
        tree = await self._freeze()
        self._start_worker()
        return tree

    async def restore(self, tree: Tree) -> None:
        """Returns the workspace to the state `tree`, with a new worker."""
        async with self._turn:
            self._require_alive()
            self._set_tree(tree)
            self._start_worker()

    async def fork(self) -> "LocalSandbox":
        """Returns another sandbox with the same workspace; waits for a place in the pool as acquire() does."""
        if self._pool.size == 1:
            raise UserError("a sandbox pool of size 1 has no room for a fork; make it larger.")
        tree, plan = await self._freeze(), self.plan
        try:
            return await self._pool.acquire(
                {},
                tree,
                packages=plan.packages,
                tests=plan.tests,
                network=plan.network,
                solution=plan.solution,
            )
        finally:
            self._start_worker()  # after the worker of the fork, for which the caller waits

    async def _freeze(self) -> Tree:
        """Returns the state of the workspace as a tree and mounts the workspace on it; no worker runs afterwards."""
        async with self._turn:
            await self._ensure_worker()
            tree = self._pool.freeze(self)
            await self._wait_for_worker_exit()
            self._set_tree(tree)
        return tree

    async def _wait_for_worker_exit(self) -> None:
        """Waits until the worker process has ended: only then is its layer complete and known to the zygote."""
        self._busy = True
        try:
            async with asyncio.timeout(REPLY_S):
                while await asyncio.get_running_loop().sock_recv(self._channel, 65536):
                    pass
        except OSError as error:  # a reset connection is an end as well, a timeout is not
            if isinstance(error, TimeoutError):
                self.end(f"it did not end within {REPLY_S:.0f} s")
        except BaseException:
            self.end("a call was cancelled")
            raise
        finally:
            self._busy = False
            if self._end is not None:
                self._channel.close()
        self._require_alive()

    def _set_tree(self, tree: Tree) -> None:
        """Makes `tree` the state of the workspace; the present worker does not know it and is replaced."""
        plan = replace(self.plan, tree=tree)
        self._pool.check_plan(plan)
        self.plan, self._worker, self._changes, self.jobs = plan, "none", {}, 0

    def _start_worker(self) -> None:
        """Starts a new worker if there is none; the next call waits for it."""
        if self._worker != "none" or self._end is not None:
            return
        old = self._channel
        try:
            self.name, self._channel = self._pool.restart_worker(self)
        except OSError as error:
            self.end(f"no new worker could be started ({error})")
            return
        old.close()
        self._worker = "starting"

    async def _ensure_worker(self) -> None:
        """Starts a worker if there is none, and waits until it is ready."""
        self._start_worker()
        self._require_alive()
        if self._worker == "starting":
            self._worker = "ready"
            await self.wait_ready(REPLY_S)

    async def close(self) -> None:
        """Kills the sandbox and every process in it. A second call does nothing."""
        self.end("it was closed")

    def end(self, why: str) -> None:
        """close() for callers outside a coroutine. `why` is part of the SandboxDied that later calls raise."""
        if self._end is None:
            self._end = why
            if self._busy:
                self._channel.shutdown(socket.SHUT_RDWR)  # wakes the waiting call, which then closes it
            else:
                self._channel.close()
            self._pool.on_sandbox_end(self)

    async def wait_ready(self, timeout_s: float) -> None:
        """Waits until the worker is ready. Raises SandboxDied when it cannot start, or has ended since it was ready."""
        await self._answer(None, timeout_s)
        self._require_alive()  # an answer that came with the timeout finds the channel closed
        if self._has_hung_up():
            self.end("its worker has ended")
            self._require_alive()

    def _has_hung_up(self) -> bool:
        """Whether the worker, which was asked nothing, has closed its socket or written there why it ends."""
        try:
            self._channel.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        return True

    async def _call(self, header: dict[str, Any], body: bytes = b"", timeout_s: float = REPLY_S) -> tuple[dict, bytes]:
        async with self._turn:
            await self._ensure_worker()
            reply, data = await self._answer(frames.pack(header, body), timeout_s)
        if "refused" in reply:
            raise SandboxFileError(reply["refused"])
        return reply, data

    async def _answer(self, request: bytes | None, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """Sends one frame and receives one. Anything unexpected ends the sandbox."""
        self._require_alive()
        self._busy = True
        loop = asyncio.get_running_loop()
        self._alarm = loop.call_later(timeout_s, self._on_timeout, f"no answer within {timeout_s:.0f} s")
        try:
            if request is not None:
                # A worker that has ended leaves its reason to be received.
                with contextlib.suppress(BrokenPipeError):
                    await loop.sock_sendall(self._channel, request)
            reply, data = await self._receive(loop)
            if "broken" in reply:
                raise ConnectionError(reply["broken"])
            return reply, data
        except (OSError, ValueError) as error:
            self.end(f"{error or type(error).__name__}")
        except BaseException:
            self.end("a call was cancelled")
            raise
        finally:
            self._alarm.cancel()
            self._busy = False
            if self._end is not None:
                self._channel.close()
        raise SandboxDied(f"sandbox {self.name} died: {self._end}")

    def _require_alive(self) -> None:
        if self._end is not None:
            raise SandboxDied(f"sandbox {self.name} is gone: {self._end}")

    def _on_timeout(self, why: str) -> None:
        """Ends the sandbox after a last second: if this machine was suspended, the answer is among the next events."""
        self._alarm = asyncio.get_running_loop().call_later(LAST_CALL_S, self.end, why)

    async def _receive(self, loop: asyncio.AbstractEventLoop) -> tuple[dict[str, Any], bytes]:
        size = frames.PREFIX.size
        data = await self._receive_some(loop, 65536)
        while len(data) < size:
            data += await self._receive_some(loop, 65536)
        header_length, body_length = frames.PREFIX.unpack_from(data)
        limit = self.limits.workspace_mb * MIB + 4 * self.limits.output_kb * 1024
        if header_length > MAX_HEADER or body_length > limit:
            raise ValueError(f"a reply of {header_length} + {body_length} bytes is more than a worker may send")
        whole = size + header_length + body_length
        if len(data) < whole:
            pieces, got = [data], len(data)
            while got < whole:
                pieces.append(await self._receive_some(loop, min(whole - got, MIB)))
                got += len(pieces[-1])
            data = b"".join(pieces)
        return json.loads(data[size : size + header_length]), data[size + header_length : whole]

    async def _receive_some(self, loop: asyncio.AbstractEventLoop, count: int) -> bytes:
        data = await loop.sock_recv(self._channel, count)
        if not data:
            raise ConnectionError("the worker has ended")
        return data


def _encode(data: bytes | str) -> bytes:
    try:
        return data.encode() if isinstance(data, str) else bytes(data)
    except UnicodeEncodeError:
        raise SandboxFileError("the text holds half of a surrogate pair, which no file can hold") from None


def _parse_result(header: dict[str, Any], body: bytes) -> RunResult:
    pieces, start = [], 0
    for length in header["pieces"]:
        pieces.append(body[start : start + length])
        start += length
    lost = header["dropped"]
    return RunResult(
        outcome=header["outcome"],
        exit_code=header["exit_code"],
        stdout=join_truncated(pieces[0], lost[0], pieces[1]).decode("utf-8", errors="replace"),
        stderr=join_truncated(pieces[2], lost[1], pieces[3]).decode("utf-8", errors="replace"),
        seconds=header["seconds"],
        truncated_bytes=sum(lost),
    )
