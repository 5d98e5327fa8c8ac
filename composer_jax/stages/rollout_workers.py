"""RolloutWorkers: the workers of a run: those that launch.rl asks for, or the run's own processes."""

import asyncio
import dataclasses
import functools
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Self, TypeVar

from composer_jax.agent.episode_context import EpisodeContext
from composer_jax.host_port import split_host_port
from composer_jax.parallel.processes import broadcast_from_process0, coordinator_address, process_count
from composer_jax.rl.rollout import PlayEpisode
from composer_jax.rl.workers.pool import PoolOptions, WorkerPool
from composer_jax.rl.workers.ray_cluster import EngineShare, RayCluster
from composer_jax.rl.workers.worker import WorkerOptions, WorkerThread
from composer_jax.rl.workers.worker_setup import WorkerSetup

T = TypeVar("T")

ALL_INTERFACES = ("", "0.0.0.0", "::")
PROCESSES_READY_S = 60.0
"""Seconds that process 0 waits for the other processes before it plays without them."""


@dataclasses.dataclass(frozen=True)
class RolloutWorkersOptions:
    """Who plays the episodes of a run beside or instead of this process."""

    pool: PoolOptions
    token: str
    """What workers must know (rl/workers/handshake.py)."""
    cluster: RayCluster | None = None
    """Whose nodes are workers, too; None has those only that connect by themselves."""
    engine_share: EngineShare = EngineShare()
    """What engines take of the cluster's nodes."""
    has_processes: bool = False
    """Whether the other processes of the run are workers, too."""

    @classmethod
    def of_processes(cls, episodes: int) -> Self:
        """The options of a run whose processes play up to so many episodes each."""
        return cls(PoolOptions(host="", local_episodes=episodes), secrets.token_hex(32), has_processes=True)


class RolloutWorkers:
    """Plays episodes on workers inside `serve`, if there are options."""

    def __init__(
        self, options: RolloutWorkersOptions | None, setup: Callable[[], WorkerSetup], context: EpisodeContext
    ):
        """setup: called if there are options."""
        self._options = options
        self._pool = options and WorkerPool(options.pool, setup(), options.token, context)

    @property
    def play(self) -> PlayEpisode | None:
        """Plays an episode of a policy on the workers; None without options."""
        return self._pool and self._pool.play

    @property
    def play_ahead(self) -> PlayEpisode | None:
        """As `play`, before all episodes that wait for a worker."""
        return self._pool and functools.partial(self._pool.play, ahead=True)

    async def serve(self, work: Awaitable[T]) -> T:
        """Awaits `work` while workers may come and go, and then ends them."""
        if self._options is None or self._pool is None:
            broadcast_from_process0(lambda: None)
            return await work
        async with self._pool as pool:
            own = {"port": pool.port, "token": self._options.token} if self._options.has_processes else None
            broadcast_from_process0(lambda: own)
            if self._options.has_processes:
                await pool.wait_for(process_count() - 1, PROCESSES_READY_S)
            if self._options.cluster is None:
                return await work
            cluster, host = self._options.cluster, self._options.pool.host
            host = cluster.host if host in ALL_INTERFACES else host
            share = self._options.engine_share
            starter = asyncio.create_task(cluster.keep_workers(host, pool.port, self._options.token, share))
            try:
                return await work
            finally:
                starter.cancel()
                await asyncio.gather(starter, return_exceptions=True)


def play_share(episodes: int) -> AbstractContextManager[object]:
    """Returns what plays episodes of process 0 in every other process, up to so many at once, until its block ends.

    Waits until process 0 is in RolloutWorkers.serve; plays nothing if process 0 has other workers.
    """
    address = broadcast_from_process0(lambda: None)
    if address is None:
        return nullcontext()
    host, _ = split_host_port(coordinator_address()) or ("", 0)
    return WorkerThread(WorkerOptions(host, address["port"], address["token"], episodes))
