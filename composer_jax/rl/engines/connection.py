"""EngineLink: a learner's connection to one engine, which is made again whenever it breaks."""

import asyncio
import contextlib
import os
import platform
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from absl import logging

from composer_jax.frames import Frame, FrameError
from composer_jax.host_port import split_host_port
from composer_jax.rl.engines.config import FleetConfig
from composer_jax.rl.engines.description import EngineDescription, EngineStatus, RequiredEngine
from composer_jax.rl.engines.engine_places import EnginePlace, EngineRefused
from composer_jax.rl.workers.channel import Channel, ChannelClosed
from composer_jax.rl.workers.handshake import ENGINES, HandshakeError, join

RETRY_S = 1.0
"""Seconds between attempts to connect."""
CONNECT_S = 10.0
"""Seconds in which an address accepts a connection."""
LOOKS = 4
"""Looks at the progress of an engine in the seconds after which it is lost without any."""


class FleetMembers(Protocol):
    """What a link tells the fleet, and what it asks."""

    def note_change(self, link: "EngineLink") -> None:
        """An engine came, went, or has other weights."""
        ...

    def is_version_known(self, status: EngineStatus) -> bool:
        """Returns whether an engine has the weights that the learner has published as this version."""
        ...


class EngineConnection:
    """One connection to an engine that can be used, from the handshake to its loss.

    Attributes:
      open_sessions, opening: sessions of this learner, and those that are being opened.
    """

    channel: Channel

    def __init__(self, description: EngineDescription, stall_s: float, on_status: Callable[[], object]) -> None:
        """on_status: called when the engine has said what it does."""
        self.description, self.status = description, EngineStatus()
        self.open_sessions = self.opening = 0
        self._stall_s, self._on_status = stall_s, on_status
        self._messages = 0
        self._moved = 0.0

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended."""
        return bool(self.channel.reason)

    @property
    def load(self) -> float:
        """Sessions per message that is sampled at once."""
        return (self.open_sessions + self.opening) / self.description.slots

    @contextlib.contextmanager
    def message(self) -> Iterator[None]:
        """Counts a message that the engine owes, from when on it has to compute."""
        if not self._messages:
            self._moved = asyncio.get_running_loop().time()
        self._messages += 1
        try:
            yield
        finally:
            self._messages -= 1

    async def note_status(self, body: dict[str, Any], arrays: list[np.ndarray]) -> Frame:
        """The handler of "status"."""
        before, self.status = self.status, EngineStatus.from_json(body)
        if (before.progress, before.version) != (self.status.progress, self.status.version):
            self._moved = asyncio.get_running_loop().time()
        self._on_status()
        return {}, []

    async def watch(self) -> None:
        """Ends the connection when the engine owes messages and computes nothing."""
        clock, interval = asyncio.get_running_loop().time, self._stall_s / LOOKS
        last = clock()
        while True:
            await asyncio.sleep(interval)
            now = clock()
            if now - last > 2 * interval:  # this process was held up, and has read nothing meanwhile
                self._moved = now
            last = now
            if self._messages and now - self._moved > self._stall_s:
                self.channel.abort(
                    f"it owes {self._messages} messages and has computed nothing for {self._stall_s:g} s"
                )
                return


class EngineLink:
    """One place of an engine.

    Attributes:
      address: HOST:PORT of the engine; before it is known, what the place is called.
      connection: to an engine that can be used; None while there is none.
      reason: why not, as the rest of a sentence.
      is_refused: whether the engine there cannot be used until somebody starts it otherwise.
      losses: connections that were lost.
    """

    def __init__(
        self, place: EnginePlace, token: str, required: RequiredEngine, config: FleetConfig, fleet: FleetMembers
    ) -> None:
        self.place, self.address, self.connection = place, place.name, None
        self.connection: EngineConnection | None
        self.reason, self.is_refused, self.losses = "has not answered yet", False, 0
        self._token, self._required, self._config, self._fleet = token, required, config, fleet
        self._bad: dict[str, str] = {}
        """Name of an engine process whose answers were refused -> why."""
        self._reload: asyncio.Task[None] | None = None
        self._reloaded = False

    @property
    def version(self) -> int:
        """Of the engine's weights, if they are those of this run; -1 otherwise."""
        connection = self.connection
        if connection is None or connection.is_lost or connection.status.is_paused:
            return -1
        return connection.status.version if self._fleet.is_version_known(connection.status) else -1

    @property
    def state(self) -> str:
        """What keeps the engine from being used or what it has, with its address."""
        if self.connection is None:
            return f"{self.address} {self.reason}"
        if self.connection.status.is_paused:
            return f"{self.address} is paused"
        return f"{self.address} has version {self.connection.status.version}"

    async def run(self) -> None:
        """Connects, and again after each loss, until it is cancelled."""
        while True:
            writer = None
            try:
                self.address = await self.place.locate()
                reader, writer, description = await connect_engine(self.address, self._token, self._config.silence_s)
                self._check(description)
                await self._serve(reader, writer, description)
            except EngineRefused as error:
                self._note(str(error), is_refused=True)
            except (OSError, FrameError, TimeoutError, asyncio.IncompleteReadError) as error:
                self._note(f"does not answer ({str(error) or type(error).__name__})")
            finally:
                if writer is not None:
                    writer.close()
            await asyncio.sleep(RETRY_S)

    def refuse(self, reason: str) -> None:
        """Ends the connection to an engine process, which is not used again."""
        if self.connection is not None and not self.connection.is_lost:
            self._bad[self.connection.description.name] = reason
            self.connection.channel.abort(reason)

    def _check(self, description: EngineDescription) -> None:
        reason = self._bad.get(description.name) or self._required.find_refusal(description)
        if reason:
            raise EngineRefused(f"cannot be used: {reason}")

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, description: EngineDescription
    ) -> None:
        connection = EngineConnection(description, self._config.stall_s, self._note_status)
        handlers = {"status": connection.note_status}
        connection.channel = Channel(reader, writer, handlers, silence_s=self._config.silence_s)
        self.connection, self.is_refused, self._reloaded = connection, False, False
        watching = asyncio.create_task(connection.watch())
        try:
            reason = await connection.channel.run()
        finally:
            self.connection = None
            for task in (watching, self._reload):
                if task is not None:
                    task.cancel()
            self._reload = None
        self.losses += 1
        if description.name in self._bad:
            raise EngineRefused(f"cannot be used: {reason}")
        self._note(f"is lost: {reason}")

    def _note_status(self) -> None:
        """Has the engine load the learner's weights if it has others, such as those of a run that was killed."""
        connection = self.connection
        assert connection is not None, "statuses come over a connection"
        if not self._fleet.is_version_known(connection.status):
            if self._reload is None:
                self._reload = asyncio.create_task(self._reload_weights(connection))
        self._fleet.note_change(self)

    async def _reload_weights(self, connection: EngineConnection) -> None:
        version = connection.status.version
        if self._reloaded:
            self.refuse(
                f"its weights of version {version} are not those that this run has published; it follows "
                f"{connection.description.follows}"
            )
            return
        self._reloaded = True
        logging.warning(
            "The engine %s has other weights of version %d than this run, and loads them.", self.address, version
        )
        try:
            await connection.channel.call("reload", {})
        except ChannelClosed:
            return
        except Exception as error:  # UserError and RemoteError: what the engine says
            self.refuse(f"it cannot load the weights of this run: {error}")
        self._reload = None

    def _note(self, reason: str, *, is_refused: bool = False) -> None:
        if reason != self.reason:
            logging.warning("The engine %s %s.", self.address, reason)
        self.reason, self.is_refused = reason, is_refused
        self._fleet.note_change(self)


async def connect_engine(
    address: str, token: str, silence_s: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, EngineDescription]:
    """Connects to an engine; returns its description, too.

    silence_s: how long the engine bears the silence of this process.

    Raises:
      EngineRefused: the address has no engine of this version that knows the token.
      OSError, FrameError, TimeoutError, asyncio.IncompleteReadError: it does not answer.
    """
    host, port = split_host_port(address) or ("", 0)
    async with asyncio.timeout(CONNECT_S):
        reader, writer = await asyncio.open_connection(host, port)
    learner = {"name": f"{platform.node()}:{os.getpid()}", "silence_s": silence_s}
    try:
        welcome = await join(reader, writer, token, ENGINES, learner)
        return reader, writer, EngineDescription.from_json(welcome["engine"])
    except HandshakeError as error:
        writer.close()
        raise EngineRefused(f"is no engine for this learner: {error}") from error
    except (KeyError, TypeError) as error:
        writer.close()
        raise EngineRefused(f"does not say what it is ({error!r}); install the same version") from error
    except BaseException:
        writer.close()
        raise
