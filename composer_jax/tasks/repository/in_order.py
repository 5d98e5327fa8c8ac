"""Work on a stream of items, several at once, whose results count in the order of the items."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")


class InOrder(Generic[S, T]):
    """work(item) for every item, at most `ahead` of them at once; next() hands the results out by the items' places.

    Who stops to ask and asks again later gets the item behind the last one: nothing that was begun is lost. So what
    comes out depends neither on `ahead` nor on how long anything takes.
    """

    def __init__(self, items: Iterator[S], work: Callable[[S], Awaitable[T]], ahead: int):
        self._items, self._work, self._ahead = items, work, ahead
        self._begun: deque[tuple[S, asyncio.Task[T]]] = deque()

    async def next(self) -> tuple[S, T] | None:
        """The next item and its result, or None after the last. Raises what its work raised."""
        while len(self._begun) < self._ahead and (item := next(self._items, None)) is not None:
            self._begun.append((item, asyncio.ensure_future(self._work(item))))
        if not self._begun:
            return None
        item, job = self._begun[0]
        result = await job
        self._begun.popleft()
        return item, result

    async def close(self) -> None:
        """Cancels what was begun and not asked for, and waits until it has ended, whatever it ends with."""
        jobs = [job for _, job in self._begun]
        self._begun.clear()
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
