"""An event loop whose clock jumps to the next timer: hours of simulated work take the time of their bookkeeping."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _NoWait(selectors.DefaultSelector):
    """Reports what is ready and never waits; the loop's clock takes the time that it would have waited."""

    def __init__(self):
        super().__init__()
        self.clock = 0.0

    def select(self, timeout=None):
        events = super().select(0)
        if not events:
            if timeout is None:
                raise RuntimeError("everything waits and no timer runs: the program hangs")
            self.clock += max(timeout, 0)
        return events


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """Functions of `asyncio.to_thread` run at once; those with an attribute `seconds` take that time on the clock."""

    def __init__(self):
        self._virtual = _NoWait()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.clock

    def run_in_executor(self, executor, func, *args):
        future = self.create_future()
        call = func.args[0] if getattr(func, "args", ()) else func  # to_thread: partial(context.run, function, ...)
        result = func(*args)

        def finish():
            if not future.done():
                future.set_result(result)

        self.call_later(getattr(call, "seconds", 0.0), finish)
        return future


def run_virtually(coroutine: Coroutine[Any, Any, T]) -> T:
    """What the coroutine returns, on a virtual clock that starts at 0."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(coroutine)
