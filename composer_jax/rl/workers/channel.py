"""Channel: calls in both directions over one connection, any number at once, each with one reply.

A call that its caller leaves is cancelled at the other end. Both ends send heartbeats: an end from which nothing has
come for `silence_s` seconds is taken for lost, because a frozen process keeps its connections.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from composer_jax.errors import UserError
from composer_jax.frames import Frame, FrameError, encode_frame, read_frame

SILENCE_S = 30.0
"""Seconds without a sign of life after which the other end is lost."""
BEATS = 4
"""Heartbeats in that time."""

Handler = Callable[[dict[str, Any], list[np.ndarray]], Awaitable[Frame]]


class ChannelClosed(Exception):
    """The connection is closed or broken; the text says why."""


class RemoteError(Exception):
    """A call failed at the other end."""


class Channel:
    """One end of a connection. Calls need no flow control: each end has as many frames under way as calls.

    Attributes:
      reason: why the channel is closed; empty while it is open.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        handlers: Mapping[str, Handler],
        *,
        silence_s: float = SILENCE_S,
    ):
        """handlers: method -> what answers calls of it, and returns header and arrays of the reply. Handlers of
        calls start in the order in which the calls were made."""
        self.reason = ""
        self._reader, self._writer, self._handlers, self._silence_s = reader, writer, handlers, silence_s
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Frame]] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._heard = asyncio.get_running_loop().time()

    async def run(self) -> str:
        """Receives until the connection ends, and returns why. Handlers that still run are cancelled first."""
        heartbeat = asyncio.create_task(self._beat())
        reason = "this end was stopped"
        try:
            while True:
                self._receive(*await read_frame(self._reader, on_bytes=self._hear))
        except (asyncio.IncompleteReadError, OSError):
            reason = "the connection ended"
        except FrameError as error:
            reason = f"the other end sent {error}"
        except KeyError as error:
            reason = f"the other end sent a frame without {error}"
        finally:
            self.close(reason)
            running = [heartbeat, *self._running.values()]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return self.reason

    async def call(self, method: str, body: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> Frame:
        """Calls a method of the other end and returns its reply; cancelling it cancels the handler there.

        Raises ChannelClosed if the connection is closed, or breaks before the reply. Errors of the handler are raised,
        too.
        """
        if self.reason:
            raise ChannelClosed(self.reason)
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._write({"call": number, "method": method, "body": body}, arrays)
        self._calls[number] = future
        try:
            return await future
        except asyncio.CancelledError:
            self._write({"cancel": number})
            raise
        finally:
            del self._calls[number]

    def notify(self, method: str, body: dict[str, Any]) -> None:
        """Calls a method of the other end without waiting for it; a channel that is closed ignores it."""
        self._write({"call": None, "method": method, "body": body})

    def close(self, reason: str) -> None:
        """Closes the connection after what was written; calls under way raise ChannelClosed. Later reasons are lost."""
        if self.reason:
            return
        self.reason = reason
        self._writer.close()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(ChannelClosed(reason))

    def abort(self, reason: str) -> None:
        """Like `close`, without waiting until the other end has read what was written."""
        self.close(reason)
        self._writer.transport.abort()

    def _write(self, header: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        if not self.reason:
            self._writer.write(encode_frame(header, arrays))

    def _hear(self) -> None:
        self._heard = asyncio.get_running_loop().time()

    async def _beat(self) -> None:
        clock, interval = asyncio.get_running_loop().time, self._silence_s / BEATS
        last = clock()
        while True:
            await asyncio.sleep(interval)
            now = clock()
            if now - last > 2 * interval:  # this process was held up, so the silence may be its own
                self._heard = now
            last = now
            if now - self._heard > self._silence_s:
                self.abort(f"nothing came for {self._silence_s:g} s")  # a frozen end reads nothing
                return
            self._write({"beat": True})

    def _receive(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        if "call" in header:
            number, method, body = header["call"], header["method"], header["body"]
            task = asyncio.create_task(self._answer(number, method, body, arrays))
            key = -id(task) if number is None else number
            self._running[key] = task
            task.add_done_callback(lambda _: self._running.pop(key, None))
        elif "cancel" in header:
            if task := self._running.get(header["cancel"]):
                task.cancel()
        elif "reply" in header:
            future = self._calls.get(header["reply"])
            if future is None or future.done():  # its caller has left
                return
            if "error" in header:
                future.set_exception((UserError if header["user"] else RemoteError)(header["error"]))
            else:
                future.set_result((header["body"], arrays))
        elif "beat" not in header:
            raise FrameError("a frame of no known kind")

    async def _answer(self, number: int | None, method: str, body: dict[str, Any], arrays: list[np.ndarray]) -> None:
        reply: dict[str, Any] = {"reply": number, "error": "the call was cancelled", "user": False}
        try:
            result, results = await self._handlers[method](body, arrays)
            if number is not None:
                self._write({"reply": number, "body": result}, results)
                number = None  # it has its reply
        except UserError as error:
            reply |= {"error": str(error), "user": True}
        except Exception as error:
            logging.exception("A call of %s failed.", method)
            reply |= {"error": f"{type(error).__name__}: {error}"}
        finally:
            if number is not None:
                self._write(reply)
