"""RolloutWorkers: the workers of a run, as launch.rl asks for them; without them this process plays all episodes."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import TypeVar

from composer_jax.agent.episode import Episode
from composer_jax.rl.rollout import EpisodeSpec, RolloutContext, play_episode
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
    """Plays episodes: on workers inside `serve`, or in this process if there are no options."""

    def __init__(
        self, options: RolloutWorkersOptions | None, setup: Callable[[], WorkerSetup], context: RolloutContext
    ):
        """setup: called if there are options."""
        self._options, self._context = options, context
        self._pool = options and WorkerPool(options.pool, setup(), options.token, context)

    def player(self, policy: Policy) -> Callable[[EpisodeSpec], Awaitable[Episode]]:
        """Returns the function that plays an episode of `policy`."""
        if self._pool is None:
            return lambda spec: play_episode(spec, policy, self._context)
        pool = self._pool
        return lambda spec: pool.play(spec, policy)

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
