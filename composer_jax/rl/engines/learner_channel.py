"""Calls from process 0 of a learner to its other processes, which sample nothing: a fleet's part of multi_host.py."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from composer_jax.parallel.command_channel import CommandReceiver, CommandSender, failure_sentence
from composer_jax.parallel.processes import process_count
from composer_jax.sampler.several_processes import OnCall, WeightsOfVersion


class LearnerLeader:
    """The end of process 0, as an asynchronous context manager. In a learner of one process it does nothing."""

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        """on_error: called in the event loop when another process fails or is gone."""
        self._on_error = on_error
        self._sender: CommandSender | None = None

    async def __aenter__(self) -> Self:
        """Waits until every other process follows."""
        if process_count() > 1:
            loop = asyncio.get_running_loop()
            self._sender = CommandSender(lambda error: loop.call_soon_threadsafe(self._on_error, error))
            try:
                await asyncio.to_thread(self._sender.connect)
            except BaseException:
                self._sender.close("process 0 ended: it stopped waiting for the other processes")
                raise
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        sender, self._sender = self._sender, None
        if sender is None:
            return
        is_failure = isinstance(error, Exception)  # an interrupt lets the others end what they do, and save
        sender.close(failure_sentence(sender.cause_of(error)) if is_failure else "")

    def send_call(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray], process: int | None) -> None:
        """Makes every other process, or one of them, call the `on_call` of its `follow`, in order.

        header: plain JSON. Raises OtherProcessError if another process failed or is gone.
        """
        if self._sender is not None:
            self._sender.send({"call": dict(header)}, arrays, processes=None if process is None else [process])


class LearnerFollower:
    """The end of every other process."""

    def follow(self, weights: WeightsOfVersion | None = None, on_call: OnCall | None = None) -> None:
        """Makes the calls of process 0 until it leaves the serving of its fleet, as Sampler.follow does.

        weights: not called, because this process has no sampler.
        """
        assert on_call is not None, "process 0 calls nothing but on_call"
        with CommandReceiver() as commands:
            for header, arrays in commands:
                on_call(header["call"], arrays)
