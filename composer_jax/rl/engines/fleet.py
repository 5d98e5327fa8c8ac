"""FleetPolicy: a TrainablePolicy (sampler/policy.py) whose tokens come from engines in processes of their own.

Engines take the learner's weights from the folder that it publishes to, by themselves and one after another. The fleet
does not wait for them: a session opens on an engine that has the weights of its group's admission or later ones, so
what a group's tokens are behind is bounded as with a sampler beside the learner (rl.max_staleness).
"""

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.rl.engines.config import FleetConfig
from composer_jax.rl.engines.connection import EngineConnection, EngineLink
from composer_jax.rl.engines.description import EngineStatus, RequiredEngine
from composer_jax.rl.engines.engine_places import EnginePlace, EnginePlaces
from composer_jax.rl.engines.fleet_session import FleetSession
from composer_jax.rl.engines.learner_channel import LearnerLeader
from composer_jax.rl.engines.router import EngineRouter
from composer_jax.sampler.policy import Policy
from composer_jax.sampler.runner import RowScores
from composer_jax.sampler.weight_checksums import WeightChecksums


@dataclasses.dataclass(frozen=True)
class Publishing:
    """How weights get to where engines follow them. Both functions are called in threads."""

    begin: Callable[[Any, Any, int], None]
    """(params, router_bias, version): returns when the arrays can be donated."""
    finish: Callable[[], None]
    """Returns when the last version is there. Raises what kept it from being written."""


class FleetPolicy:
    """Attributes:
    version: the newest one that is published, or being written.
    resampled: messages that had to be sampled again because their engine was lost.
    """

    def __init__(
        self,
        places: EnginePlaces,
        token: str,
        required: RequiredEngine,
        config: FleetConfig,
        publishing: Publishing,
        *,
        vocab_size: int,
        version: int,
        checksums: WeightChecksums,
        only_fitting: bool = False,
        most_sessions: int | None = None,
    ) -> None:
        """
        Args:
          places: of the engines, which may come and go.
          token: what engines and this learner know (rl/workers/handshake.py).
          version, checksums: of the weights that the run goes on from, which are published.
          only_fitting, most_sessions: as in EngineRouter.
        """
        self.version, self.resampled = version, 0
        self.required, self.vocab_size = required, vocab_size
        self._first, self._known = version, {version: frozenset(checksums)}
        self._publishing = publishing
        self._places = places
        self._new_link = functools.partial(EngineLink, token=token, required=required, config=config, fleet=self)
        self._running: dict[EngineLink, asyncio.Task[None]] = {}
        self._removed_losses = 0
        self.router = EngineRouter(
            config.patience_s, places.advice, only_fitting=only_fitting, most_sessions=most_sessions
        )
        self._leader = LearnerLeader(self.router.fail)
        self._writing: asyncio.Task[None] | None = None
        self._messages, self._busy, self._busy_since = 0, 0.0, 0.0

    # -- Policy --------------------------------------------------------------------------------------------------

    async def open(self, seed: int, *, ahead: bool = False) -> FleetSession:
        """See TrainablePolicy.open: a session of an engine with the newest weights."""
        return await self._open(seed, self.version, ahead=ahead)

    def of_version(self, version: int) -> Policy:
        """Returns a Policy whose sessions open on engines that have this version or a later one."""
        return _PolicyOfVersion(functools.partial(self._open, least_version=version))

    async def _open(self, seed: int, least_version: int, *, ahead: bool = False) -> FleetSession:
        session = FleetSession(self, seed, least_version)
        await session.connect(ahead=ahead)
        return session

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Self]:
        """See ServingPolicy.serving; leaves the engines, which go on for other learners."""
        self._loop = asyncio.get_running_loop()
        tasks = [self._start(work) for work in (self._follow_places(), self.router.watch())]
        try:
            async with self._leader:
                yield self
            if self._writing is not None:
                await self._writing
        finally:
            tasks += self._running.values()  # together, so that engines which their places end now do not count as lost
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for link in [*self._running]:
                self._remove(link)
            if self._writing is not None:
                await asyncio.gather(self._writing, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._note_end)
        return task

    async def _follow_places(self) -> None:
        """Has a link to every place that there is, and to no other one."""
        async for places in self._places.looks():
            known = {link.place: link for link in self.router.links}
            for place in known.keys() - set(places):
                self._remove(known[place])
            for place in places:
                if place not in known:
                    self._add(place)

    def _add(self, place: EnginePlace) -> None:
        link = self._new_link(place)
        self.router.links.append(link)
        self._running[link] = self._start(link.run())

    def _remove(self, link: EngineLink) -> None:
        """Leaves a place; sessions that are open there open elsewhere when they sample next."""
        self.router.links.remove(link)
        self._removed_losses += link.losses + (link.connection is not None)
        self._running.pop(link).cancel()

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self.router.fail(error)

    # -- TrainablePolicy -----------------------------------------------------------------------------------------

    @property
    def busy_seconds(self) -> float:
        """Seconds in which an engine owed a message."""
        return self._busy + (time.perf_counter() - self._busy_since if self._messages else 0.0)

    @contextlib.contextmanager
    def message(self) -> Iterator[None]:
        """Counts a message that is being sampled, and its time."""
        if not self._messages:
            self._busy_since = time.perf_counter()
        self._messages += 1
        try:
            yield
        finally:
            self._messages -= 1
            if not self._messages:
                self._busy += time.perf_counter() - self._busy_since

    def reset_prefix_cache(self) -> None:
        """See TrainablePolicy.reset_prefix_cache; an engine does it before it opens later sessions."""
        self._notify("reset_prefix_cache")

    async def update_serving(
        self,
        params: Any,
        router_bias: Any,
        version: int,
        *,
        mode: Literal["recompute", "keep", "drain"],
        checksums: WeightChecksums | None = None,
    ) -> None:
        """Publishes weights; returns when the arrays can be donated, while they are being written.

        mode: is the engines' own; each of them takes the version when it has read it.

        Raises what kept the version before from being written.
        """
        assert checksums is not None, "engines are known by the checksums of their weights"
        if self._writing is not None:
            await self._writing
        self._known[version] = frozenset(checksums)
        self.version = version
        await asyncio.to_thread(self._publishing.begin, params, router_bias, version)
        self._writing = asyncio.create_task(self._finish_writing())

    async def _finish_writing(self) -> None:
        try:
            await asyncio.to_thread(self._publishing.finish)
        except Exception as error:
            self.router.fail(error)
            raise
        self._notify("look")

    async def pause(self, *, will_resume: bool) -> None:
        """Does nothing: engines share no device with the learner."""

    def resume(self) -> None:
        """Does nothing, as `pause` does."""

    def score(self, tokens: Sequence[int]) -> RowScores:
        """Returns what each engine with the newest weights says about a row; waits for the first such engine.

        Called in a thread while the policy serves. The routes are those of one of them.
        """
        return asyncio.run_coroutine_threadsafe(self._score(tokens), self._loop).result()

    async def _score(self, tokens: Sequence[int]) -> RowScores:
        replays = self.required.route_shape is not None
        params = SamplingParams(1, prompt_logprobs=True, return_routing=replays)
        one = await self.router.acquire(self.version, ahead=True, needs_room=False)
        one.opening -= 1
        sessions = []
        try:
            for connection in self.router.usable(self.version):
                session = FleetSession(self, 0, self.version)
                await session.connect(ahead=True, connection=connection)
                sessions.append(session)
            samples = [await session.sample(tokens, params) for session in sessions]
        finally:
            for session in sessions:
                session.close()
        rows = [sample.prompt.logprobs[1:] for sample in samples if sample.prompt is not None]
        routing = samples[0].routing
        return RowScores(np.asarray(rows, np.float32), None if routing is None else routing[: len(tokens) - 1])

    def call_followers(
        self, header: Mapping[str, Any], arrays: Sequence[np.ndarray] = (), *, process: int | None = None
    ) -> None:
        """See Sampler.call_followers; nothing has to be paused, because the other processes sample nothing."""
        self._leader.send_call(header, arrays, process)

    # -- for links and sessions ----------------------------------------------------------------------------------

    def note_change(self, link: EngineLink) -> None:
        """See FleetMembers."""
        self.router.assign()

    def is_version_known(self, status: EngineStatus) -> bool:
        """See FleetMembers. Versions before the first of this process are those of an engine that is late."""
        if status.version < self._first:
            return True
        return status.version in self._known and self._known[status.version].issuperset(status.checksums)

    def metrics(self) -> dict[str, int]:
        """Returns columns of metrics/rl.jsonl: engines with the newest weights and those behind, and losses so far."""
        versions = [link.version for link in self.router.links]
        return {
            "engines_newest": sum(version == self.version for version in versions),
            "engines_late": sum(0 <= version < self.version for version in versions),
            "engines_lost": self._removed_losses + sum(link.losses for link in self.router.links),
            "messages_resampled": self.resampled,
        }

    def link_of(self, connection: EngineConnection) -> EngineLink | None:
        """Returns the link of a connection; None if it has another one by now."""
        return next((link for link in self.router.links if link.connection is connection), None)

    def _notify(self, method: str) -> None:
        for link in self.router.links:
            if link.connection is not None:
                link.connection.channel.notify(method, {})


class _PolicyOfVersion:
    def __init__(self, open_session: Callable[[int], Any]) -> None:
        self._open = open_session

    async def open(self, seed: int) -> FleetSession:
        return await self._open(seed)
