"""EngineRouter: gives sessions to the least loaded engines; they wait while none has room and the weights."""

import asyncio
import dataclasses
import math
from collections import deque

from absl import logging

from composer_jax.errors import UserError
from composer_jax.rl.engines.connection import EngineConnection, EngineLink

SAY_S = 5.0
"""Seconds without a usable engine after which the log says so, and from then on after twice as long each time."""
LOOK_S = 0.5
"""Seconds from one look at the engines to the next."""


@dataclasses.dataclass(eq=False)
class _Turn:
    """A session that waits for an engine."""

    least_version: int
    ahead: bool
    needs_room: bool
    result: asyncio.Future[EngineConnection]


class EngineRouter:
    """Attributes:
    links: the engines that there are; FleetPolicy adds and removes them.
    """

    def __init__(self, patience_s: float, advice: str, *, only_fitting: bool, most_sessions: int | None) -> None:
        """
        Args:
          advice: how there comes to be an engine, as sentences.
          most_sessions: that are open at once, on all engines together; None: no such bound.
          patience_s: how long sessions wait while all engines are gone or refused.
          only_fitting: an engine gets no more sessions than fit into its cache however long they grow.
        """
        self.links: list[EngineLink] = []
        self._patience_s, self._advice, self._only_fitting = patience_s, advice, only_fitting
        self._most = math.inf if most_sessions is None else most_sessions
        self._waiting: deque[_Turn] = deque()
        self._error: Exception | None = None

    async def acquire(self, least_version: int, *, ahead: bool, needs_room: bool = True) -> EngineConnection:
        """Takes a place at the least loaded engine; it counts as `opening` there until the caller changes that.

        Args:
          least_version: of the engine's weights.
          ahead: goes before all that wait without it.
          needs_room: False takes a place at an engine that has no room, too, before all others.

        Raises UserError if no engine could be used for patience_s, and the exception that `fail` got.
        """
        if self._error is not None:
            raise self._error
        turn = _Turn(least_version, ahead, needs_room, asyncio.get_running_loop().create_future())
        place = sum(one.ahead for one in self._waiting) if ahead else len(self._waiting)
        place = place if needs_room else 0
        self._waiting.insert(place, turn)
        self.assign()
        try:
            return await turn.result
        except asyncio.CancelledError:
            if turn.result.done() and not turn.result.cancelled() and turn.result.exception() is None:
                turn.result.result().opening -= 1
            turn.result.cancel()
            self.assign()
            raise

    def assign(self) -> None:
        """Gives places to those who wait; call it when an engine may have room or other weights."""
        if not self._waiting:
            return
        usable = [(link.version, link.connection) for link in self.links if link.connection is not None]
        usable = [(version, one) for version, one in usable if version >= 0 and not one.is_lost]
        room = self._most - sum(one.open_sessions + one.opening for _, one in usable)
        left: deque[_Turn] = deque()
        while self._waiting:
            free = [(version, one) for version, one in usable if room > 0 and self._has_room(one)]
            turn = self._waiting[0]
            if turn.needs_room and not free:
                break
            self._waiting.popleft()
            if turn.result.done():
                continue
            engines = [one for version, one in (free if turn.needs_room else usable) if version >= turn.least_version]
            if not engines:
                left.append(turn)
                continue
            best = min(engines, key=lambda one: one.load)
            best.opening += 1
            room -= 1
            turn.result.set_result(best)
        self._waiting = left + self._waiting

    def _has_room(self, one: EngineConnection) -> bool:
        """An engine that has a message for every slot gets one session at a time, which opens when its cache allows."""
        sessions, what = one.open_sessions + one.opening, one.description
        if self._only_fitting:
            return sessions < min(what.slots, what.fitting)
        return sessions < what.slots or not one.opening

    def usable(self, least_version: int) -> list[EngineConnection]:
        """Returns the engines that have such weights."""
        links = (link for link in self.links if link.version >= least_version)
        return [link.connection for link in links if link.connection is not None]

    def fail(self, error: Exception) -> None:
        """Ends all waiting with an error, also that of later callers."""
        self._error = self._error or error
        while self._waiting:
            if not (turn := self._waiting.popleft()).result.done():
                turn.result.set_exception(self._error)

    async def watch(self) -> None:
        """Says who waits for what, and ends the waiting when the patience is over, until it is cancelled."""
        clock = asyncio.get_running_loop().time
        since, say_at = None, SAY_S
        while True:
            await asyncio.sleep(min(LOOK_S, self._patience_s / 4))
            missing = self._missing_version()
            if missing is None:
                if since is not None and say_at > SAY_S:
                    logging.warning("An engine can be used again; the run goes on after %.0f s.", clock() - since)
                since, say_at = None, SAY_S
                continue
            since = clock() if since is None else since
            waited = clock() - since
            if waited >= self._patience_s or (self.links and all(link.is_refused for link in self.links)):
                self.fail(UserError(self._sentence(missing, waited)))
                return
            if waited >= say_at:
                logging.warning("The run waits for an engine: %s.", self._states())
                say_at *= 2

    def _missing_version(self) -> int | None:
        """Returns the lowest weight version that sessions wait for if all engines lack it; None otherwise."""
        versions = [turn.least_version for turn in self._waiting if not turn.result.done()]
        if not versions or self.usable(min(versions)):
            return None
        return min(versions)

    def _states(self) -> str:
        return "; ".join(link.state for link in self.links) or "there is none"

    def _sentence(self, version: int, waited: float) -> str:
        return (
            f"No engine could be used with weights of version {version} for {waited:.0f} s: {self._states()}. "
            f"{self._advice} The same command continues."
        )
