"""A value that is costly to make, made at most once and away from the event loop, whoever asks first."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")

_THREADS = ThreadPoolExecutor(max_workers=8, thread_name_prefix="async-lazy")


def _ignore_error(future: asyncio.Future) -> None:
    if not future.cancelled():
        future.exception()


class AsyncLazy(Generic[T]):
    """make() in a thread, once; who asks meanwhile waits for the same. What it raises goes to all who wait, and the
    next to ask makes it try again. Works from any event loop; who is cancelled cancels only his own waiting."""

    def __init__(self, make: Callable[[], T]):
        self._make = make
        self._lock = threading.Lock()
        self._future: Future[T] | None = None

    async def get(self) -> T:
        """The value."""
        waiting = asyncio.wrap_future(self._submit())
        waiting.add_done_callback(_ignore_error)  # who was cancelled hears of no error, and nobody else has this future
        return await asyncio.shield(waiting)

    def get_here(self) -> T:
        """The value, for callers that may block. Made here if no thread is at it yet, so that what is made can itself
        ask for other values: it never waits for a thread to become free."""
        future = self._submit()
        self._compute(future)
        return future.result()

    async def settled(self) -> None:
        """Waits until it is not being made, if it is; whether it could be made does not matter here."""
        with self._lock:
            future = self._future
        if future is not None:
            waiting = asyncio.wrap_future(future)
            waiting.add_done_callback(_ignore_error)
            await asyncio.wait([waiting])

    @property
    def is_computing(self) -> bool:
        """Whether a thread is at it, or is about to be."""
        with self._lock:
            return self._future is not None and not self._future.done()

    def _submit(self) -> "Future[T]":
        with self._lock:
            failed = self._future is not None and self._future.done() and self._future.exception() is not None
            if self._future is None or failed:
                self._future = Future()
                _THREADS.submit(self._compute, self._future)
            return self._future

    def _compute(self, future: "Future[T]") -> None:
        """Makes the value unless another thread has begun to."""
        with self._lock:
            if future.running() or future.done() or not future.set_running_or_notify_cancel():
                return
        try:
            future.set_result(self._make())
        except BaseException as error:
            future.set_exception(error)
