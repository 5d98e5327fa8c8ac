"""GroupPlayer: plays groups of episodes as tasks of the event loop; every group ends in exactly one event."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

from composer_jax.agent.episode import Episode
from composer_jax.agent.episode_spec import EpisodeSpec


class GroupPlayer:
    """Plays any number of groups at once. An asynchronous context manager; leaving it cancels what still plays."""

    def __init__(
        self,
        play: Callable[[EpisodeSpec], Awaitable[Episode]],
        on_group: Callable[[int, Sequence[Episode]], Awaitable[None]],
        on_episode: Callable[[Episode], None] | None = None,
    ):
        """
        Args:
          play: plays one episode, whatever happens to its sandboxes; limits how many run at once.
          on_group: awaited with the number and the episodes of each group that ends, in the order of its specs. A group
            that is cancelled is not reported.
          on_episode: called with each episode as it ends.
        """
        self._play_episode = play
        self._on_group, self._on_episode = on_group, on_episode
        self._groups: dict[int, asyncio.Task] = {}
        self._cancelled: set[asyncio.Task] = set()
        self._changed = asyncio.Event()
        self._error: BaseException | None = None

    @property
    def playing(self) -> int:
        return len(self._groups)

    def start(self, number: int, specs: Sequence[EpisodeSpec]) -> None:
        """Starts to play a group."""
        task = asyncio.create_task(self._play(number, specs), name=f"group {number}")
        self._groups[number] = task
        task.add_done_callback(lambda task: self._finish(number, task))

    def cancel(self, number: int) -> None:
        """Stops a group that plays; does nothing if it has ended. Its sandboxes and cache pages are freed."""
        if task := self._groups.pop(number, None):
            self._cancelled.add(task)
            task.add_done_callback(self._cancelled.discard)
            task.cancel()

    async def change(self) -> None:
        """Waits until a group has ended since the last call. Raises what ended an episode otherwise than an outcome."""
        if self._error is None:
            await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error

    async def _play(self, number: int, specs: Sequence[EpisodeSpec]) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._play_one(spec)) for spec in specs]
        await self._on_group(number, [task.result() for task in tasks])

    async def _play_one(self, spec: EpisodeSpec) -> Episode:
        episode = await self._play_episode(spec)
        if self._on_episode:
            self._on_episode(episode)
        return episode

    def _finish(self, number: int, task: asyncio.Task) -> None:
        if self._groups.get(number) is not task:  # cancelled
            return
        del self._groups[number]
        if task.cancelled():
            return
        if error := task.exception():
            self._error = self._error or (error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error)
        self._changed.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for number in list(self._groups):
            self.cancel(number)
        await asyncio.gather(*self._cancelled, return_exceptions=True)  # cancelled episodes return their sandboxes
