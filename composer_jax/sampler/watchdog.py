"""Watchdog: logs who waits for what when a sampler makes no progress.

A sampler stands still in a device call that does not end (a collective that another process does not enter, a compiler
that is slow), or between calls, when no request can run. From outside both look like a request without an answer.
"""

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from absl import logging

from composer_jax.sampler.scheduler import Scheduler
from composer_jax.sampler.sequence import SchedulerOutput, SequenceState

POLLS = 10
"""Looks at the sampler per `seconds` of the watchdog."""


@dataclasses.dataclass(frozen=True)
class Activity:
    """What a sampler is doing at one moment."""

    scheduler: Scheduler
    calls: Sequence[SchedulerOutput]
    """The device calls that are outstanding, oldest first."""
    update: tuple[int, str] | None
    """Version and mode of weights that are to be installed."""
    is_paused: bool
    progress: Hashable
    """Differs from the one before when a device call has started or ended, or weights were installed."""
    waits_for_others: bool = False
    """Whether it is paused by somebody who resumes it (RL, while the learner has the devices), or rests until other
    engines rest, too."""

    @property
    def is_busy(self) -> bool:
        """Whether somebody waits for something that the sampler should do now."""
        scheduler = self.scheduler
        return not self.waits_for_others and bool(scheduler.waiting or scheduler.running or self.calls or self.update)


class Watchdog:
    """Warns after `seconds` without progress, and then after twice as long each time."""

    def __init__(
        self,
        seconds: float,
        observe: Callable[[], Activity],
        *,
        name: str = "The sampler",
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[[str], None] = logging.warning,
    ) -> None:
        """
        Args:
          seconds: 0 switches it off.
          observe: says what the sampler, or one engine of it, is doing; called in the event loop.
          name: of what is observed, which begins a sentence.
        """
        self._seconds, self._observe, self._clock, self._warn = seconds, observe, clock, warn
        self._name = name
        self._timer: asyncio.TimerHandle | None = None
        self._since: float | None = None
        self._progress: Hashable = None
        self._next = seconds

    def start(self) -> None:
        """Begins to look, by timers of the running event loop, which do not keep the loop alive."""
        self._since = None
        if self._seconds:
            self._timer = asyncio.get_running_loop().call_later(self._seconds / POLLS, self._poll)

    def stop(self) -> None:
        """Ends what `start` began."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def check(self) -> None:
        """Looks once; logs a warning if nothing progressed for long enough while somebody waits."""
        activity, now = self._observe(), self._clock()
        if not activity.is_busy:
            self._since = None
        elif self._since is None or activity.progress != self._progress:
            self._since, self._next, self._progress = now, self._seconds, activity.progress
        elif now - self._since >= self._next:
            self._next = 2 * (now - self._since)
            self._warn(describe_stall(activity, now - self._since, self._name))

    def _poll(self) -> None:
        self.check()
        self._timer = asyncio.get_running_loop().call_later(self._seconds / POLLS, self._poll)


def describe_stall(activity: Activity, seconds: float, name: str = "The sampler") -> str:
    """Returns sentences: how long nothing progressed, what runs, how many requests wait for what."""
    scheduler = activity.scheduler
    parts = [f"{name} made no progress for {seconds:.0f} s.", _describe_calls(activity.calls)]
    n_running = len(scheduler.running)
    if n_running:
        parts.append(f"{_count(n_running, 'request')} {'runs' if n_running == 1 else 'run'}.")
    if activity.is_paused:
        parts.append("The sampler is paused; call resume.")
    if activity.update is not None:
        parts.append(_describe_update(activity, *activity.update))
    if scheduler.waiting:
        parts += _describe_waiting(activity)
    return " ".join(parts)


def _describe_calls(calls: Sequence[SchedulerOutput]) -> str:
    if not calls:
        return "No device call is running."
    names, oldest = [], calls[0]
    if oldest.prefill_shape is not None:
        rows, tokens = oldest.prefill_shape
        filled = len(oldest.prefill)
        names.append(f"a prefill call of {rows} rows per device and {tokens} tokens ({filled} rows filled)")
    if oldest.decode:
        longest = max(len(sequence.tokens) for sequence in oldest.decode)
        names.append(f"a decode call of {_count(len(oldest.decode), 'row')} of up to {longest} tokens")
    behind = f", and {_count(len(calls) - 1, 'call')} behind" if len(calls) > 1 else ""
    names = " and ".join(names) or "a read of the experts that tokens chose"
    return f"Running on the devices: {names}{behind}; the first call of a shape compiles."


def _describe_update(activity: Activity, version: int, mode: str) -> str:
    if mode == "drain" and activity.scheduler.running:
        return f"Weights of version {version} wait until the running requests have ended (mode='drain')."
    if activity.calls:
        return f"Weights of version {version} wait for the end of the device call."
    return f"Weights of version {version} are being installed."


def _describe_waiting(activity: Activity) -> list[str]:
    scheduler = activity.scheduler
    waiting = scheduler.waiting
    reasons = Counter(_reason(activity, sequence) for sequence in waiting)
    oldest = min(waiting, key=lambda sequence: sequence.arrival)
    listed = ", ".join(f"{n} for {reason}" for reason, n in reasons.items())
    n_pages = sum(pool.n_pages for pool in scheduler.pools)
    running = {(s.shard, page) for s in scheduler.running for page in s.pages[s.n_skipped :]}
    return [
        f"{_count(len(waiting), 'request')} {'waits' if len(waiting) == 1 else 'wait'}: {listed}.",
        f"Running requests hold {len(running)} of {n_pages} pages, sessions {scheduler.n_held_pages - len(running)} "
        "more.",
        f"The oldest waiting request has {len(oldest.tokens)} tokens.",
    ]


def _reason(activity: Activity, sequence: SequenceState) -> str:
    scheduler = activity.scheduler
    if activity.is_paused:
        return "the end of the pause"
    if activity.update is not None:
        return "the new weights"
    rows = Counter(s.shard for s in scheduler.running)
    free = [shard for shard in range(scheduler.limits.shards) if rows[shard] < scheduler.limits.rows]
    if not free:
        return f"one of {scheduler.limits.shards * scheduler.limits.rows} slots"
    if sequence.home >= 0 and sequence.home not in free:
        return "a slot on the device that has the pages of its session"
    if scheduler.awaits_prefix(sequence) is not None:
        return "a prefix that a running request computes"
    if not any(scheduler.has_pages(sequence, shard) for shard in free):
        return "free pages"
    return "its turn"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
