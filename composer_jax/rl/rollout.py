"""Rollouts: concurrent episodes of one policy."""

import asyncio
import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from absl import logging

from composer_jax.agent.episode import Episode, EpisodeLimits, run_episode
from composer_jax.agent.summary import Compaction
from composer_jax.agent.transcript import Transcript
from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.rl.effort import EffortConfig
from composer_jax.sampler.policy import Policy, Sample, Session
from composer_jax.sandbox import SandboxDied, SandboxPool
from composer_jax.seeds import hash_seed
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
    effort: str = ""
    """The level of RolloutContext.effort that the system message names; "" names none. One for all of a group
    (rl/effort.py: draw_effort)."""


@dataclasses.dataclass(frozen=True)
class RolloutContext:
    """What episodes need besides a policy."""

    chat: ChatFormat
    pool: SandboxPool
    limits: EpisodeLimits
    cache: ResultCache
    infrastructure_retries: int = 2
    """Further attempts at an episode that was lost; it is not scored if all attempts are lost."""
    images: ImagePools | None = None
    """Containers for tasks with an image; None refuses such tasks."""
    system_prompt: str = ""
    """Text of the system message of every episode; "" writes none."""
    effort: EffortConfig = EffortConfig()
    """Defines the levels of effort that specs name; the text of a level follows `system_prompt`."""
    temperature: float = 1.0
    """Of everything that is sampled; RL trains on episodes of temperature 1."""
    episode_seconds: float | None = None
    """Limit on the seconds of tools and harness in an episode (agent.episode_seconds); None sets none."""
    return_routing: bool = False
    """Records the experts of every token in the transcripts, for router replay."""


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


PlayEpisode = Callable[[EpisodeSpec, Policy], Awaitable[Episode]]
"""Plays one episode of a policy, as `play_episode` does in this process and the workers of rl/workers elsewhere."""


async def roll_out(
    specs: Sequence[EpisodeSpec],
    policy: Policy,
    context: RolloutContext,
    on_done: Callable[[Episode], None] | None = None,
    play_one: PlayEpisode | None = None,
) -> Rollout:
    """Plays all episodes; the policy limits how many run at once.

    Args:
      on_done: called with each episode as it ends, in no particular order.
      play_one: plays an episode; None plays it in this process, with `context`.
    """
    play_one = play_one or functools.partial(play_episode, context=context)
    cache = context.cache
    began, busy, runs, hits = time.perf_counter(), policy.busy_seconds, cache.runs, cache.hits

    async def play(spec: EpisodeSpec) -> Episode:
        episode = await play_one(spec, policy)
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


async def play_episode(spec: EpisodeSpec, policy: Policy, context: RolloutContext) -> Episode:
    """Plays one episode; an attempt that the infrastructure loses is repeated with new random numbers.

    An attempt is lost if its sandboxes die without the policy's doing, or if the harness raises, which is logged. If
    the last attempt is lost, the episode has no reward. What the policy breaks, its time limit or its sandbox, is an
    outcome with grade 0, which ends the attempts (docs/rewards.md).

    Raises:
      UserError: the task cannot be played with this context.
      Exception: what the policy raises.
    """
    episode = None
    for attempt in range(context.infrastructure_retries + 1):
        seed = spec.seed if attempt == 0 else hash_seed("retry", spec.seed, attempt)
        try:
            async with _image_workspace(spec.task, context):
                session = _WatchedSession(await policy.open(seed))
                try:
                    episode = await _attempt(spec, seed, session, context)
                finally:
                    session.close()
        except SandboxDied as error:
            episode = lost_episode(spec.task, seed, str(error))
        if episode.outcome != "infrastructure":
            break
    assert episode is not None, "there is at least one attempt"
    return dataclasses.replace(episode, effort=spec.effort)


def _image_workspace(task: Task, context: RolloutContext) -> AbstractAsyncContextManager[object]:
    """Returns what creates the workspace of a task with an image, so that no session waits while a container starts."""
    if task.image is None or context.images is None:
        return nullcontext()
    return context.images.workspace(task)


async def _attempt(spec: EpisodeSpec, seed: int, session: "_WatchedSession", context: RolloutContext) -> Episode:
    try:
        return await run_episode(
            spec.task,
            session,
            context.pool,
            context.chat,
            seed=seed,
            compaction=spec.compaction,
            limits=context.limits,
            cache=context.cache,
            images=context.images,
            system_prompt=context.effort.system_prompt(spec.effort, context.system_prompt),
            temperature=context.temperature,
            return_routing=context.return_routing,
            episode_seconds=context.episode_seconds,
        )
    except UserError:
        raise
    except Exception as error:
        if session.has_failed:
            raise
        detail = f"{type(error).__name__}: {error}"
        logging.warning("An episode of task %s is lost: %s", spec.task.id, detail, exc_info=True)
        return lost_episode(spec.task, seed, detail)


def lost_episode(task: Task, seed: int, detail: str) -> Episode:
    """Returns an episode that the infrastructure lost; `detail` says how."""
    return Episode(task.id, task.family, task.split, seed, Transcript(), None, "infrastructure", detail=detail)


class _WatchedSession:
    """A Session that knows whether the policy failed, which is not a failure of the episode."""

    def __init__(self, session: Session):
        self._session, self.max_model_len, self.has_failed = session, session.max_model_len, False

    async def sample(self, context: Sequence[int], params: SamplingParams, branch: int = 0) -> Sample:
        try:
            return await self._session.sample(context, params, branch=branch)
        except Exception:
            self.has_failed = True
            raise

    def close(self) -> None:
        self._session.close()


def require_graded(episodes: Sequence[Episode]) -> None:
    """Raises a UserError if there are episodes and the infrastructure lost all of them."""
    if episodes and all(episode.reward is None for episode in episodes):
        raise UserError(
            f"All {len(episodes)} episodes were lost, the first one because of: {episodes[0].detail or 'no reason'}. "
            "Mend that and start the command again; it goes on where it was."
        )
