"""DeviceCalls: the device calls that have started and whose results the host has not read, oldest first.

A call starts, is outstanding, and finishes; calls finish in the order of their starts. One thing happens at a time: a
call starts only after the start before it has returned, and none starts after one that failed, since whoever awaits
`start` or `finish_oldest` gets the exception.
"""

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from composer_jax.sampler.sequence import SchedulerOutput

ROUTING_READ = SchedulerOutput(None, [], [])
"""The schedule of a call that only reads routing."""


@dataclasses.dataclass(frozen=True)
class OutstandingCall:
    """Calls that are started together."""

    schedule: SchedulerOutput
    """ROUTING_READ, or what they compute."""
    finish: Callable[[], Any]
    """Waits for the results and returns them; called in the thread of the calls."""
    commit: Callable[[Any], Awaitable[None]]
    """Takes the results, in the event loop."""


class BusyTime:
    """Seconds in which calls of some engines were outstanding: those of any of them, up to the last start or end."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._outstanding = 0
        self._noted = 0.0

    def note(self, change: int) -> None:
        """Notes that there are more outstanding calls, or fewer."""
        now = time.perf_counter()
        self.seconds += now - self._noted if self._outstanding else 0.0
        self._noted, self._outstanding = now, self._outstanding + change


class DeviceCalls:
    """The outstanding calls of an engine that serves; false while there are none.

    They have a thread of their own, since the event loop's threads are fewer than the engines of a large sampler.
    """

    def __init__(self, most_ahead: int, busy: BusyTime) -> None:
        """
        Args:
          most_ahead: outstanding schedules behind which the next one may start.
          busy: of the sampler.
        """
        self.progress = 0
        """Starts and ends of calls so far."""
        self._busy = busy
        self._most_ahead = most_ahead
        self._outstanding: deque[OutstandingCall] = deque()
        self._starting: SchedulerOutput | None = None
        self._thread = ThreadPoolExecutor(1, "device-calls")

    def __bool__(self) -> bool:
        return bool(self._outstanding)

    @property
    def is_full(self) -> bool:
        """Whether a call must finish before the next schedule."""
        return sum(bool(call.schedule) for call in self._outstanding) > self._most_ahead

    @property
    def schedules(self) -> tuple[SchedulerOutput, ...]:
        """Of all calls, the one that is starting included."""
        starting = () if self._starting is None else (self._starting,)
        return *(call.schedule for call in self._outstanding), *starting

    async def start(
        self,
        schedule: SchedulerOutput,
        function: Callable[..., Callable[[], Any]],
        *arguments: Any,
        commit: Callable[[Any], Awaitable[None]],
    ) -> None:
        """Starts calls by function(*arguments), which runs in the thread and returns OutstandingCall.finish."""
        self._note(1)
        self._starting = schedule
        try:
            finish = await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        except BaseException:
            self._note(-1)
            raise
        finally:
            self._starting = None
        self._outstanding.append(OutstandingCall(schedule, finish, commit))

    async def finish_oldest(self) -> None:
        """Waits for the results of the oldest call and commits them."""
        call = self._outstanding[0]
        results = await asyncio.get_running_loop().run_in_executor(self._thread, call.finish)
        self._outstanding.popleft()
        self._note(-1)
        await call.commit(results)

    def forget(self) -> None:
        """Drops calls whose results nobody reads any more."""
        self._note(-len(self._outstanding))
        self._outstanding.clear()

    def _note(self, change: int) -> None:
        """Notes that there are more outstanding calls, or fewer."""
        self._busy.note(change)
        self.progress += 1
