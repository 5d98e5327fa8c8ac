"""A concurrent map over a stream of items, whose results come in the order of the items."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")


class OrderedMap(Generic[S, T]):
    """Runs work(item) for every item, at most `ahead` at once; next() returns the results in the order of the items.

    A caller that stops and continues later gets the item after its last one: no started work is lost. The results
    depend neither on `ahead` nor on how long any work takes.
    """

    def __init__(self, items: Iterator[S], work: Callable[[S], Awaitable[T]], ahead: int):
        self._items, self._work, self._ahead = items, work, ahead
        self._started: deque[tuple[S, asyncio.Task[T]]] = deque()

    async def next(self) -> tuple[S, T] | None:
        """The next item and its result, or None after the last. Raises the exception of its work."""
        while len(self._started) < self._ahead and (item := next(self._items, None)) is not None:
            self._started.append((item, asyncio.ensure_future(self._work(item))))
        if not self._started:
            return None
        item, job = self._started[0]
        result = await job
        self._started.popleft()
        return item, result

    async def close(self) -> None:
        """Cancels the started work whose results were not taken, and waits until it has ended."""
        jobs = [job for _, job in self._started]
        self._started.clear()
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
