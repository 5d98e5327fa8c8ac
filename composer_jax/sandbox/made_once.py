"""A value that is costly to make, made at most once and away from the event loop, whoever asks first."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")

_MAKERS = ThreadPoolExecutor(max_workers=8, thread_name_prefix="once")


class MadeOnce(Generic[T]):
    """make() in a thread, once; who asks meanwhile waits for the same. What it raises goes to all who wait, and the
    next to ask makes it try again. Works from any event loop; who is cancelled cancels only his own waiting."""

    def __init__(self, make: Callable[[], T]):
        self._make = make
        self._lock = threading.Lock()
        self._future: Future[T] | None = None

    async def get(self) -> T:
        """The value."""
        return await asyncio.shield(asyncio.wrap_future(self._ordered()))

    def get_here(self) -> T:
        """The value, for callers that may block."""
        return self._ordered().result()

    def _ordered(self) -> "Future[T]":
        with self._lock:
            failed = self._future is not None and self._future.done() and self._future.exception() is not None
            if self._future is None or failed:
                self._future = _MAKERS.submit(self._make)
            return self._future
