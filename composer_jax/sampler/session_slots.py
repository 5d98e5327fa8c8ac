"""SessionSlots: the open sessions of one serving, and which of those that wait opens next."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SessionSlots(Generic[T]):
    """At most `slots` sessions are open at the same time, so that their contexts fit into the cache."""

    def __init__(self, slots: int, raise_if_ended: Callable[[], None]) -> None:
        """raise_if_ended: raises what ended the serving, to sessions that wait."""
        self._slots, self._raise_if_ended = slots, raise_if_ended
        self._open: set[T] = set()
        self._n_ahead = 0  # of those that wait
        self._changed = asyncio.Event()

    async def open(self, make: Callable[[], T], *, ahead: bool) -> T:
        """Returns make() as soon as there is room for a session.

        ahead: opens before those that wait without it.
        """
        self._raise_if_ended()
        self._n_ahead += ahead
        try:
            while len(self._open) >= self._slots or (self._n_ahead and not ahead):
                self._changed.clear()
                await self._changed.wait()
                self._raise_if_ended()
        finally:
            if ahead:
                self._n_ahead -= 1
                self.wake()  # the others may open again, once nobody is ahead of them
        session = make()
        self._open.add(session)
        return session

    def close(self, session: T) -> None:
        """Makes room for another session."""
        self._open.discard(session)
        self.wake()

    def wake(self) -> None:
        """Makes those that wait look again, also at whether the serving has ended."""
        self._changed.set()
