"""PinnedEvaluation: measures the weights that a policy serves, while it goes on to play training episodes."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Self

Evaluate = Callable[[int, int], Awaitable[None]]
"""(completed step, version of its weights) -> plays whatever is due after that step on the policy that serves them."""


class PinnedEvaluation:
    """An evaluation as a task of the event loop. Whoever installs other weights awaits `end` first.

    An asynchronous context manager; leaving it cancels an evaluation that runs.
    """

    def __init__(self, evaluate: Evaluate | None) -> None:
        """evaluate: None measures nothing."""
        self._evaluate = evaluate
        self._task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether an evaluation has begun and not ended."""
        return self._task is not None and not self._task.done()

    async def start(self, step: int, version: int) -> None:
        """Begins what is due after a step; returns without waiting for its end. The one before has ended."""
        assert not self.is_running, "the weights of a running evaluation were replaced"
        if self._evaluate is not None:
            self._task = asyncio.ensure_future(self._evaluate(step, version))
            await asyncio.sleep(0)  # its episodes ask for slots before those of training that start now

    async def end(self) -> None:
        """Waits until the evaluation has ended. Raises what it raised."""
        if self._task is not None:
            await self._task

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)  # its episodes return their sandboxes
