"""An event loop in a thread of its own, so that code which is not asynchronous can use it anywhere: also in a
notebook, whose cells run inside an event loop already and may start no second one in their thread. And `run_all`, for
the code that runs on it."""

import asyncio
import concurrent.futures
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs coroutines at once and returns what they return; if one fails, the others are cancelled and end first."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventLoop:
    """Use as a context manager: the loop lives from the beginning of the block to its end."""

    def __init__(self):
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "event-loop")
        self._runner = asyncio.Runner()
        self._loop = self._thread.submit(self._runner.get_loop).result()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns or raises. Ctrl-C cancels it, waits until it has cleaned up, and is raised."""
        started: concurrent.futures.Future[asyncio.Task] = concurrent.futures.Future()

        async def main() -> T:
            task = asyncio.current_task()
            assert task is not None, "the runner runs this coroutine as a task"
            started.set_result(task)
            return await coroutine

        future = None
        try:
            future = self._thread.submit(lambda: self._runner.run(main()))
            return future.result()
        except BaseException:
            if future is not None and not future.done():
                self._loop.call_soon_threadsafe(started.result().cancel)
                concurrent.futures.wait([future])
            raise

    def __enter__(self) -> "EventLoop":
        return self

    def __exit__(self, *_) -> None:
        self._thread.submit(self._runner.close).result()
        self._thread.shutdown()
