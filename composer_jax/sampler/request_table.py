"""RequestTable: the requests of a sampler that have no answer yet, and what device calls bring to each of them."""

import asyncio
from collections.abc import Sequence

from composer_jax.sampler.policy import FinishReason
from composer_jax.sampler.request import RequestHandle
from composer_jax.sampler.run_schedule import StepOutput
from composer_jax.sampler.runner import Runner
from composer_jax.sampler.scheduler import Scheduler
from composer_jax.sampler.sequence import CacheLease, SchedulerOutput, SequenceState


class RequestTable:
    """Handles by their sequences. A handle leaves it when its future is done, and its pages are free then."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler, self._runner = scheduler, runner
        self._handles: dict[int, RequestHandle] = {}  # by the id of their sequence
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
        for handle in list(self._handles.values()):
            if not handle.future.done():
                if reason is None:
                    handle.finish("cancelled")
                else:
                    handle.future.set_exception(reason)
            self._forget(handle)
        self.free_done()

    async def commit(self, schedule: SchedulerOutput, results: StepOutput) -> None:
        """Gives requests what device calls computed for them, and ends those that are complete."""
        for i, chunk in enumerate(schedule.prefill):
            self._scheduler.commit_prefill(chunk)
            if results.scores is not None and not chunk.sequence.uses_cache:
                self._handles[id(chunk.sequence)].add_scores(chunk.start, results.scores[i])
        ended: list[tuple[RequestHandle, FinishReason]] = []
        for sequence, new in zip(schedule.decode, results.decoded, strict=True):
            handle, length = self._handles[id(sequence)], len(sequence.tokens)
            self._scheduler.commit_decode(sequence, new.tokens)
            if handle.future.done():
                continue  # cancelled during the call
            before = len(handle.tokens)
            reason = handle.extend(new, results.version)
            if reason is not None:
                self._scheduler.truncate(sequence, length + len(handle.tokens) - before)
                ended.append((handle, reason))
        for handle, reason in ended:
            routing = None
            if handle.request.params.return_routing:
                routing = await asyncio.to_thread(self._runner.read_routing, handle.sequence)
            if handle.future.done():
                continue  # cancelled meanwhile
            self._scheduler.finish(handle.sequence)
            del self._handles[id(handle.sequence)]
            handle.finish(reason, routing)

    def _forget(self, handle: RequestHandle) -> None:
        """Frees the pages of a request, unless its end has done that already."""
        if self._handles.pop(id(handle.sequence), None) is not None:
            self._scheduler.cancel(handle.sequence)
