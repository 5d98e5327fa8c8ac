"""RolloutWorkers: the workers of a run, as launch.rl asks for them."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import TypeVar

from composer_jax.agent.episode import Episode
from composer_jax.rl.rollout import EpisodeSpec, RolloutContext
from composer_jax.rl.workers.pool import PoolOptions, WorkerPool
from composer_jax.rl.workers.ray_cluster import RayCluster
from composer_jax.rl.workers.worker_setup import WorkerSetup
from composer_jax.sampler.policy import Policy

T = TypeVar("T")

ALL_INTERFACES = ("", "0.0.0.0", "::")


@dataclasses.dataclass(frozen=True)
class RolloutWorkersOptions:
    """Who plays the episodes of a run beside or instead of this process."""

    pool: PoolOptions
    token: str
    """What workers must know (rl/workers/handshake.py)."""
    cluster: RayCluster | None = None
    """Whose nodes are workers, too; None has those only that connect by themselves."""


class RolloutWorkers:
    """Plays episodes on workers inside `serve`, if there are options."""

    def __init__(
        self, options: RolloutWorkersOptions | None, setup: Callable[[], WorkerSetup], context: RolloutContext
    ):
        """setup: called if there are options."""
        self._options = options
        self._pool = options and WorkerPool(options.pool, setup(), options.token, context)

    @property
    def play(self) -> Callable[[EpisodeSpec, Policy], Awaitable[Episode]] | None:
        """Plays an episode of a policy on the workers; None without options."""
        return self._pool and self._pool.play

    async def serve(self, work: Awaitable[T]) -> T:
        """Awaits `work` while workers may come and go, and then ends them."""
        if self._options is None or self._pool is None:
            return await work
        async with self._pool as pool:
            if self._options.cluster is None:
                return await work
            cluster, host = self._options.cluster, self._options.pool.host
            host = cluster.host if host in ALL_INTERFACES else host
            starter = asyncio.create_task(cluster.keep_workers(host, pool.port, self._options.token))
            try:
                return await work
            finally:
                starter.cancel()
                await asyncio.gather(starter, return_exceptions=True)
