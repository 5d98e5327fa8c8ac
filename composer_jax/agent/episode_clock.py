"""EpisodeClock: the limit on the seconds of tools and harness in an episode."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class OutOfTime(Exception):
    """An episode has used its seconds up."""


class EpisodeClock:
    """Limits the seconds of a block, in which it can be paused. For one task and those that it awaits."""

    def __init__(self, limit_s: float | None = None):
        """limit_s: None sets no limit."""
        self._limit_s = limit_s
        self._timeout: asyncio.Timeout | None = None
        self._left_s: float | None = None
        self._pauses = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context that is cancelled where it is when its seconds are used up. Raises OutOfTime then."""
        try:
            async with asyncio.timeout(self._limit_s) as self._timeout:
                yield
        except TimeoutError as error:
            if self._timeout is None or not self._timeout.expired():
                raise
            raise OutOfTime(
                f"tools and harness took longer than {self._limit_s:g} s (agent.episode_seconds)"
            ) from error
        finally:
            self._timeout = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context whose seconds do not count. Overlapping ones of several tasks pause until the last one ends."""
        self._pauses += 1
        if self._pauses == 1:
            self._stop()
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._resume()

    def _stop(self) -> None:
        timeout = self._timeout
        if timeout is not None and not timeout.expired() and (end := timeout.when()) is not None:
            self._left_s = end - asyncio.get_running_loop().time()
            timeout.reschedule(None)

    def _resume(self) -> None:
        left_s, self._left_s = self._left_s, None
        if left_s is not None and self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time() + left_s)
