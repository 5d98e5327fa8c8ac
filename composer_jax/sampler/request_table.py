"""RequestTable: the requests of a sampler that have no answer yet, and what device calls bring to each of them."""

import functools
from collections.abc import Sequence

import numpy as np

from composer_jax.sampler.device_calls import ROUTING_READ, DeviceCalls
from composer_jax.sampler.policy import FinishReason
from composer_jax.sampler.request import RequestHandle
from composer_jax.sampler.runner import Runner
from composer_jax.sampler.scheduler import Scheduler
from composer_jax.sampler.sequence import CacheLease, SchedulerOutput, SequenceState
from composer_jax.sampler.start_schedule import StepOutput


class RequestTable:
    """Handles by their sequences. A handle leaves it when its future is done, and its pages are free then."""

    def __init__(self, scheduler: Scheduler, runner: Runner, calls: DeviceCalls) -> None:
        self._scheduler, self._runner, self._calls = scheduler, runner, calls
        self._handles: dict[int, RequestHandle] = {}  # by the id of their sequence
        self._await_routing: set[RequestHandle] = set()
        """Complete ones without pages, whose routing is being read."""
        self._done: list[RequestHandle] = []
        self._closed_leases: list[CacheLease] = []

    def add(self, handle: RequestHandle) -> None:
        """Queues a request."""
        self._scheduler.submit(handle.sequence)
        self._handles[id(handle.sequence)] = handle
        handle.on_cancel = self._done.append
        handle.future.add_done_callback(lambda _: self._done.append(handle))

    def handles(self, sequences: Sequence[SequenceState]) -> list[RequestHandle]:
        """Returns the handles of sequences."""
        return [self._handles[id(sequence)] for sequence in sequences]

    def close(self, lease: CacheLease) -> None:
        """Notes that a session was closed; its pages are freed before the next device call."""
        self._closed_leases.append(lease)

    def free_done(self) -> None:
        """Frees the pages of requests that were cancelled or failed, and of sessions that were closed.

        The time is proportional to their number. The event loop reports a request whose future was cancelled (not by
        RequestHandle.cancel) in its next round.
        """
        for handle in self._done:
            self._forget(handle)
        self._done.clear()
        for lease in self._closed_leases:
            self._scheduler.drop(lease)
        self._closed_leases.clear()

    def end_all(self, reason: Exception | None = None) -> None:
        """Ends every request with an exception, or with what it has sampled and the finish reason "cancelled"."""
        for handle in [*self._handles.values(), *self._await_routing]:
            if not handle.future.done():
                if reason is None:
                    handle.finish("cancelled")
                else:
                    handle.future.set_exception(reason)
            self._forget(handle)
        self._await_routing.clear()
        self.free_done()

    async def commit(self, schedule: SchedulerOutput, results: StepOutput) -> int:
        """Gives requests what device calls computed for them, and ends those that are complete; returns their tokens.

        A request that has left the table since the calls started gets nothing: it ended in the calls before, or was
        cancelled.
        """
        for i, chunk in enumerate(schedule.prefill):
            handle = self._handles.get(id(chunk.sequence))
            if handle is not None and results.scores is not None and not chunk.sequence.uses_cache:
                handle.add_scores(chunk.start, results.scores[i])
        n_tokens = 0
        ended: list[tuple[RequestHandle, FinishReason]] = []
        for sequence, new in zip(schedule.decode, results.decoded, strict=True):
            handle, length = self._handles.get(id(sequence)), len(sequence.tokens)
            if handle is None or handle.future.done():
                continue
            self._scheduler.commit_decode(sequence, new.tokens)
            before = len(handle.tokens)
            reason = handle.extend(new, results.version)
            n_new = len(handle.tokens) - before
            n_tokens += n_new
            if reason is not None:
                self._scheduler.truncate(sequence, length + n_new)
                ended.append((handle, reason))
        await self._end(ended)
        return n_tokens

    async def _end(self, ended: Sequence[tuple[RequestHandle, FinishReason]]) -> None:
        """Ends complete requests, after the read of the routing of those that ask for it has started."""
        asking = [end for end in ended if end[0].request.params.return_routing]
        if asking:
            wanted = [(handle.sequence, handle.request.params.routing_start) for handle, _ in asking]
            take = functools.partial(self._take_routing, asking)
            await self._calls.start(ROUTING_READ, self._runner.start_routing, wanted, commit=take)
        for handle, reason in ended:
            if handle.future.done():
                continue  # cancelled meanwhile
            self._scheduler.finish(handle.sequence)
            del self._handles[id(handle.sequence)]
            if handle.request.params.return_routing:
                self._await_routing.add(handle)
            else:
                handle.finish(reason)

    async def _take_routing(
        self, asking: Sequence[tuple[RequestHandle, FinishReason]], routes: Sequence[np.ndarray]
    ) -> None:
        for (handle, reason), routing in zip(asking, routes, strict=True):
            self._await_routing.discard(handle)
            if not handle.future.done():  # else cancelled meanwhile
                handle.finish(reason, routing)

    def _forget(self, handle: RequestHandle) -> None:
        """Frees the pages of a request, unless its end has done that already."""
        if self._handles.pop(id(handle.sequence), None) is not None:
            self._scheduler.cancel(handle.sequence)
