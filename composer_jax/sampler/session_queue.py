"""SessionQueue: the sessions that wait to open, in the order in which they came, and the engine on which each opens.

A session opens on the engine with the least to do of those with room for it, and stays there, where the pages of its
contexts are. Nobody waits while an engine has room: whenever a session ends anywhere, the first that waits opens.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from composer_jax.sampler.session_gate import Place, SessionGate


class SessionHost(Protocol):
    """An engine that serves, as the queue knows it."""

    @property
    def gate(self) -> SessionGate:
        """Its open sessions."""
        ...

    @property
    def load(self) -> int:
        """Open sessions, or requests if these are more."""
        ...


Host = TypeVar("Host", bound=SessionHost)


class SessionQueue(Generic[Host]):
    """Who opens next, and where, in one serving of a sampler."""

    def __init__(
        self,
        engines: Sequence[Host],
        raise_if_ended: Callable[[], object] = lambda: None,
        *,
        most_sessions: int | None = None,
    ) -> None:
        """
        Args:
          engines: that serve.
          raise_if_ended: raises what ended the serving.
          most_sessions: that are open at once on all engines, whatever their caches hold; None: no such bound.
        """
        self._engines, self._raise_if_ended = engines, raise_if_ended
        self._most = math.inf if most_sessions is None else most_sessions
        self._waiting: tuple[dict[asyncio.Future[tuple[Host, Place]], None], ...] = {}, {}
        """Sessions that go ahead; the others."""
        for engine in engines:
            engine.gate.on_change = self._admit

    @property
    def n_open(self) -> int:
        """Open sessions of all engines."""
        return sum(engine.gate.n_open for engine in self._engines)

    async def open(self, *, ahead: bool) -> tuple[Host, Place]:
        """Returns an engine and a place in its gate as soon as there is room for a session.

        ahead: opens before those that wait without it, and is never held back.
        """
        self._raise_if_ended()
        turn: asyncio.Future[tuple[Host, Place]] = asyncio.get_running_loop().create_future()
        waiting = self._waiting[0 if ahead else 1]
        waiting[turn] = None
        self._admit()
        try:
            return await turn
        except asyncio.CancelledError:
            waiting.pop(turn, None)
            if turn.cancelled():
                self._admit()  # those behind it may have room
            elif turn.exception() is None:
                engine, place = turn.result()
                engine.gate.close(place)
            raise

    def end(self, reason: Exception) -> None:
        """Raises what ended the serving in all that wait."""
        for waiting in self._waiting:
            for turn in waiting:
                if not turn.done():
                    turn.set_exception(reason)
            waiting.clear()

    def _admit(self) -> None:
        """Opens sessions that wait while there is room."""
        for waiting, ahead in zip(self._waiting, (True, False), strict=True):
            while waiting:
                engine = self._choose(ahead)
                if engine is None:
                    return
                turn = next(iter(waiting))
                del waiting[turn]
                if not turn.done():  # else cancelled
                    turn.set_result((engine, engine.gate.open(ahead=ahead)))

    def _choose(self, ahead: bool) -> Host | None:
        """Returns the engine on which the next session opens; None if it has to wait."""
        if self.n_open >= self._most:
            return None
        free = [engine for engine in self._engines if engine.gate.has_room(ahead=ahead)]
        if not free:
            self._engines[0].gate.log_waiting(len(self._engines))  # all of them are about as full
            return None
        return min(free, key=lambda engine: engine.load)
