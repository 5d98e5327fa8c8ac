"""A value that is computed at most once, on first use, in a thread."""

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
    """The result of make(), which runs in a thread on first use; concurrent callers wait for the same run.

    An exception is raised in every waiting caller, and the next call tries again. Works from any event loop.
    Cancelling one caller does not cancel the others.
    """

    def __init__(self, make: Callable[[], T]):
        self._make = make
        self._lock = threading.Lock()
        self._future: Future[T] | None = None

    async def get(self) -> T:
        """Returns the value."""
        waiting = asyncio.wrap_future(self._submit())
        waiting.add_done_callback(
            _ignore_error
        )  # a cancelled caller never reads the error, and no other has this future
        return await asyncio.shield(waiting)

    def get_here(self) -> T:
        """Returns the value; blocks. Runs make() in this thread if no other thread has begun.

        So make() itself may call get_here() of other values without waiting for a free thread.
        """
        future = self._submit()
        self._compute(future)
        return future.result()

    async def settled(self) -> None:
        """Waits until make() does not run; its errors are not raised here."""
        with self._lock:
            future = self._future
        if future is not None:
            waiting = asyncio.wrap_future(future)
            waiting.add_done_callback(_ignore_error)
            await asyncio.wait([waiting])

    @property
    def is_computing(self) -> bool:
        """Whether make() runs or is queued."""
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
        """Runs make() unless another thread has begun."""
        with self._lock:
            if future.running() or future.done() or not future.set_running_or_notify_cancel():
                return
        try:
            future.set_result(self._make())
        except BaseException as error:
            future.set_exception(error)
