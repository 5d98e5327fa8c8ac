"""Rollouts: concurrent episodes of one policy."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence

from composer_jax.agent.episode import Episode, EpisodeLimits, run_episode
from composer_jax.agent.search import Embedder
from composer_jax.agent.summary import Compaction
from composer_jax.data.chat_format import ChatFormat
from composer_jax.sampler.policy import Policy
from composer_jax.sandbox import SandboxPool
from composer_jax.tasks.images.pools import ImagePools
from composer_jax.tasks.result_cache import ResultCache
from composer_jax.tasks.task import Task


@dataclasses.dataclass(frozen=True)
class EpisodeSpec:
    """Specification of one episode."""

    task: Task
    seed: int
    """uint32; fixes everything that the policy samples."""
    compaction: Compaction
    group: int = 0
    """Episodes of one rollout that share a number are a group: attempts at one task."""


@dataclasses.dataclass(frozen=True)
class RolloutContext:
    """What episodes need besides a policy."""

    chat: ChatFormat
    pool: SandboxPool
    limits: EpisodeLimits
    cache: ResultCache
    infrastructure_retries: int = 2
    """Further attempts at an episode whose sandboxes died; it is not scored if all attempts fail."""
    embedder: Embedder | None = None
    """Embeds text for the tool semantic_search (run_episode)."""
    images: ImagePools | None = None
    """Containers for tasks with an image; None refuses such tasks."""
    system_prompt: str = ""
    """Text of the system message of every episode; "" writes none."""
    temperature: float = 1.0
    """Of everything that is sampled; RL trains on episodes of temperature 1."""


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Episodes, and the time and sandbox commands that they took."""

    specs: Sequence[EpisodeSpec]
    episodes: list[Episode]
    """In the order of `specs`."""
    seconds: float
    sampler_seconds: float
    """Seconds in which the policy computed; the rest of `seconds` went into sandboxes and grading."""
    sandbox_runs: int
    """Commands that ran in a sandbox."""
    sandbox_hits: int
    """Commands whose result came from the cache, because the episode had run them on the same files before."""


async def roll_out(
    specs: Sequence[EpisodeSpec],
    policy: Policy,
    context: RolloutContext,
    on_done: Callable[[Episode], None] | None = None,
) -> Rollout:
    """Plays all episodes; the policy limits how many run at once.

    Args:
      on_done: called with each episode as it ends, in no particular order.
    """
    cache = context.cache
    began, busy, runs, hits = time.perf_counter(), policy.busy_seconds, cache.runs, cache.hits

    async def play(spec: EpisodeSpec) -> Episode:
        episode = await _play(spec, policy, context)
        if on_done:
            on_done(episode)
        return episode

    async with policy.serving():
        running = [asyncio.create_task(play(spec)) for spec in specs]
        try:
            episodes = list(await asyncio.gather(*running))
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)  # cancelled episodes return their sandboxes
    return Rollout(
        specs,
        episodes,
        seconds=time.perf_counter() - began,
        sampler_seconds=policy.busy_seconds - busy,
        sandbox_runs=cache.runs - runs,
        sandbox_hits=cache.hits - hits,
    )


async def _play(spec: EpisodeSpec, policy: Policy, context: RolloutContext) -> Episode:
    """Plays one episode, again after an infrastructure failure."""
    for _ in range(context.infrastructure_retries + 1):
        session = await policy.open(spec.seed)
        try:
            episode = await run_episode(
                spec.task,
                session,
                context.pool,
                context.chat,
                seed=spec.seed,
                compaction=spec.compaction,
                limits=context.limits,
                cache=context.cache,
                embedder=context.embedder,
                images=context.images,
                system_prompt=context.system_prompt,
                temperature=context.temperature,
            )
        finally:
            session.close()
        if episode.outcome != "infrastructure":
            break
    return episode
