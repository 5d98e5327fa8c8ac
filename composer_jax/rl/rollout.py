"""Rollouts: many episodes at once against one policy, each ending in exactly one result."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence

from composer_jax.agent.episode import Episode, Limits, run_episode
from composer_jax.agent.search import Embedder
from composer_jax.agent.summary import Compaction
from composer_jax.data.chat_format import ChatFormat
from composer_jax.sampler.policy import Policy
from composer_jax.sandbox import SandboxPool
from composer_jax.tasks.images.pools import ImagePools
from composer_jax.tasks.result_cache import ResultCache
from composer_jax.tasks.task import Task


@dataclasses.dataclass(frozen=True)
class Job:
    """One episode to be run."""

    task: Task
    seed: int
    compaction: Compaction


@dataclasses.dataclass(frozen=True)
class Environment:
    """What episodes need beside a policy."""

    chat: ChatFormat
    pool: SandboxPool
    limits: Limits
    cache: ResultCache
    infrastructure_retries: int = 2
    """Fresh attempts at an episode whose sandboxes died. Such an episode is never scored."""
    embedder: Embedder | None = None
    """Of semantic_search (run_episode)."""
    images: ImagePools | None = None
    """Of tasks that need one; without, they are refused."""


@dataclasses.dataclass(frozen=True)
class Rollout:
    jobs: Sequence[Job]
    episodes: list[Episode]
    """In the order of the jobs."""
    seconds: float
    sampler_seconds: float
    """Time in which the policy computed; the rest of `seconds` was spent waiting for sandboxes and grading."""
    sandbox_runs: int
    """Commands that ran in a sandbox."""
    sandbox_hits: int
    """Commands whose result was known, because the same files had been run before."""


async def roll_out(
    jobs: Sequence[Job],
    policy: Policy,
    environment: Environment,
    on_done: Callable[[Episode], None] | None = None,
) -> Rollout:
    """Runs all jobs; as many at once as the policy opens sessions."""
    cache = environment.cache
    began, busy, runs, hits = time.perf_counter(), policy.busy_seconds, cache.runs, cache.hits

    async def one(job: Job) -> Episode:
        for attempt in range(environment.infrastructure_retries + 1):
            session = await policy.open(job.seed)
            try:
                episode = await run_episode(
                    job.task,
                    session,
                    environment.pool,
                    environment.chat,
                    seed=job.seed,
                    compaction=job.compaction,
                    limits=environment.limits,
                    cache=cache,
                    embedder=environment.embedder,
                    images=environment.images,
                )
            finally:
                session.close()
            if episode.outcome != "infrastructure" or attempt == environment.infrastructure_retries:
                break
        if on_done:
            on_done(episode)
        return episode

    async with policy.serving():
        running = [asyncio.create_task(one(job)) for job in jobs]
        try:
            episodes = list(await asyncio.gather(*running))
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)  # they give back what they hold
    return Rollout(
        jobs,
        episodes,
        seconds=time.perf_counter() - began,
        sampler_seconds=policy.busy_seconds - busy,
        sandbox_runs=cache.runs - runs,
        sandbox_hits=cache.hits - hits,
    )
