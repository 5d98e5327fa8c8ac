"""EnginePort: the engine's end: a TCP port at which learners open sessions of what this process serves."""

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import numpy as np
from absl import logging

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.frames import Frame, FrameError
from composer_jax.rl.engines.description import EngineDescription, EngineStatus
from composer_jax.rl.workers.channel import Channel, Handler
from composer_jax.rl.workers.handshake import ENGINES, HandshakeError, accept
from composer_jax.rl.workers.messages import sample_to_frame
from composer_jax.rl.workers.served_episode import ServedEpisode
from composer_jax.sampler.policy import Session

STATUS_S = 1.0
"""Seconds from one status to the next; a learner also gets one when the weights have changed."""
LOOK_S = 0.05
"""Seconds from one look for other weights to the next."""


class ServedPolicy(Protocol):
    """What learners sample from, such as a Sampler."""

    async def open(self, seed: int, *, ahead: bool = False) -> Session:
        """See TrainablePolicy.open."""
        ...

    def reset_prefix_cache(self) -> None:
        """See TrainablePolicy.reset_prefix_cache."""
        ...


@dataclasses.dataclass(frozen=True)
class ServedEngine:
    """What a port serves."""

    policy: ServedPolicy
    description: EngineDescription
    status: Callable[[], EngineStatus]
    """What the engine does now. Raises what has ended it."""
    look: Callable[[], Awaitable[object]]
    """Takes the newest version of its folder, if it has another one."""
    reload: Callable[[], Awaitable[None]]
    """Loads the newest version of its folder, whatever it has."""


class EnginePort:
    """Serves learners while `run` runs."""

    def __init__(self, engine: ServedEngine, token: str, listening: socket.socket) -> None:
        """listening: a bound socket."""
        self._engine, self._token, self._listening = engine, token, listening
        self._connections: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        """Set when a call has failed because the engine has ended."""

    async def run(self) -> None:
        """Serves until it is cancelled, or the engine has ended; all sessions are closed then."""
        server = await asyncio.start_server(self._connect, sock=self._listening)
        logging.info("Learners can connect at port %d.", self._listening.getsockname()[1])
        try:
            while True:
                self._engine.status()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(STATUS_S):
                        await self._ended.wait()
        except Exception as error:
            logging.error("The engine has ended and leaves its learners: %s", error)
        finally:
            server.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a server's connections are tasks"
        self._connections.add(task)
        try:
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            return  # asyncio would log it as an error of the callback
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        welcome = {"engine": dataclasses.asdict(self._engine.description)}
        try:
            learner = await accept(reader, writer, self._token, ENGINES, welcome)
            name, silence_s = str(learner["name"]), float(learner["silence_s"])
        except (HandshakeError, FrameError, TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            logging.warning("A connection from %s is refused: %s", peer, error or type(error).__name__)
            return
        except (KeyError, TypeError, ValueError) as error:
            logging.warning("A learner at %s does not say what it is: %r", peer, error)
            return
        logging.info("The learner %s has connected.", name)
        desk = _LearnerDesk(self._engine, self._ended)
        channel = Channel(reader, writer, desk.handlers, silence_s=silence_s)
        reporting = asyncio.create_task(self._report(channel))
        try:
            reason = await channel.run()
            logging.info("The learner %s is gone: %s.", name, reason)
        finally:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)
            await desk.sessions.close()

    async def _report(self, channel: Channel) -> None:
        """Tells a learner what the engine does."""
        clock, sent, sent_at = asyncio.get_running_loop().time, None, 0.0
        while True:
            status = self._engine.status()
            weights = status.version, status.checksums, status.is_paused
            if weights != sent or clock() - sent_at >= STATUS_S:
                channel.notify("status", dataclasses.asdict(status))
                sent, sent_at = weights, clock()
            await asyncio.sleep(LOOK_S)


class _LearnerDesk:
    """The handlers of one learner's channel, and its sessions."""

    def __init__(self, engine: ServedEngine, ended: asyncio.Event) -> None:
        """ended: set when a call fails because the engine has ended."""
        self.sessions = ServedEpisode(engine.policy)
        self._engine, self._ended = engine, ended
        handlers: dict[str, Handler] = {
            "open": self._open,
            "sample": self._sample,
            "close": self._close,
            "reset_prefix_cache": self._reset_prefix_cache,
            "look": self._look,
            "reload": self._reload,
        }
        self.handlers = {method: self._leaving(handler) for method, handler in handlers.items()}

    def _leaving(self, handler: Handler) -> Handler:
        """Returns a handler that answers nothing if the engine has ended, until the connection is closed.

        A learner whose connection is closed samples elsewhere. With an error in place of an answer it would ask the
        same engine again, which has the fewest sessions by then, and take further errors for its own.
        """

        async def handle(body: dict[str, Any], arrays: list[np.ndarray]) -> Frame:
            try:
                return await handler(body, arrays)
            except Exception:
                if self._has_ended():
                    self._ended.set()
                    await asyncio.get_running_loop().create_future()
                raise

        return handle

    def _has_ended(self) -> bool:
        try:
            self._engine.status()
        except Exception:
            return True
        return False

    async def _open(self, body: dict[str, Any], arrays: list[np.ndarray]) -> Frame:
        options = {"ahead": True} if body["ahead"] else {}
        session, max_model_len = await self.sessions.open(body["seed"], **options)
        return {"session": session, "max_model_len": max_model_len}, []

    async def _sample(self, body: dict[str, Any], arrays: list[np.ndarray]) -> Frame:
        params = SamplingParams(**body["params"])
        sample = await self.sessions.sample(body["session"], body["start"], arrays[0], params, body["branch"])
        return sample_to_frame(sample)

    async def _close(self, body: dict[str, Any], arrays: list[np.ndarray]) -> Frame:
        self.sessions.close_session(body["session"])
        return {}, []

    async def _reset_prefix_cache(self, body: dict[str, Any], arrays: list[np.ndarray]) -> Frame:
        self._engine.policy.reset_prefix_cache()
        return {}, []

    async def _look(self, body: dict[str, Any], arrays: list[np.ndarray]) -> Frame:
        await self._engine.look()
        return {}, []

    async def _reload(self, body: dict[str, Any], arrays: list[np.ndarray]) -> Frame:
        await self._engine.reload()
        return {}, []


def bind_port(host: str, port: int) -> socket.socket:
    """Returns a socket at the port, which does not listen yet. Raises OSError or OverflowError."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except BaseException:
        with contextlib.suppress(OSError):
            listening.close()
        raise
    return listening
