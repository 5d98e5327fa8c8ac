"""Rollouts: concurrent episodes of one policy."""

import dataclasses
import functools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext

from absl import logging

from composer_jax.agent.episode import Episode, run_episode
from composer_jax.agent.episode_context import EpisodeContext
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.transcript import Transcript
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.event_loop import run_all
from composer_jax.sampler.policy import Policy, Sample, ServingPolicy, Session
from composer_jax.sandbox import SandboxDied
from composer_jax.seeds import hash_seed

PlayEpisode = Callable[[EpisodeSpec, Policy], Awaitable[Episode]]
"""Plays one episode of a policy, as `play_episode` does in this process and the workers of rl/workers elsewhere."""


async def roll_out(
    specs: Sequence[EpisodeSpec],
    policy: ServingPolicy,
    context: EpisodeContext,
    on_done: Callable[[Episode], None] | None = None,
    play_one: PlayEpisode | None = None,
) -> list[Episode]:
    """Plays all episodes and returns them in the order of `specs`; the policy limits how many run at once.

    Args:
      on_done: called with each episode as it ends, in no particular order.
      play_one: plays an episode; None plays it in this process, with `context`.
    """
    play_one = play_one or functools.partial(play_episode, context=context)

    async def play(spec: EpisodeSpec) -> Episode:
        episode = await play_one(spec, policy)
        if on_done:
            on_done(episode)
        return episode

    async with policy.serving():
        return await run_all(play(spec) for spec in specs)


async def play_episode(spec: EpisodeSpec, policy: Policy, context: EpisodeContext) -> Episode:
    """Plays one episode; an attempt that the infrastructure loses is repeated with new random numbers.

    An attempt is lost if its sandboxes die without the policy's doing, or if the harness raises, which is logged. If
    the last attempt is lost, the episode has no reward. What the policy breaks, its time limit or its sandbox, is an
    outcome with grade 0, which ends the attempts (docs/rewards.md).

    Raises UserError if the task cannot be played with this context. Errors of the policy are raised, too.
    """
    episode = None
    for number in range(context.settings.infrastructure_retries + 1):
        seed = spec.seed if number == 0 else hash_seed("retry", spec.seed, number)
        attempt = dataclasses.replace(spec, seed=seed)
        try:
            task, images = spec.task, context.images
            # The workspace first, so that no session waits while the container of a task with an image starts.
            workspace = nullcontext() if task.image is None or images is None else images.workspace(task)
            async with workspace:
                session = _WatchedSession(await policy.open(seed))
                try:
                    episode = await _play_attempt(attempt, session, context)
                finally:
                    session.close()
        except SandboxDied as error:
            episode = lost_episode(attempt, str(error))
        if episode.outcome != "infrastructure":
            break
    assert episode is not None, "there is at least one attempt"
    return episode


async def _play_attempt(spec: EpisodeSpec, session: "_WatchedSession", context: EpisodeContext) -> Episode:
    try:
        return await run_episode(spec, session, context)
    except UserError:
        raise
    except Exception as error:
        if session.has_failed:
            raise
        detail = f"{type(error).__name__}: {error}"
        logging.warning("An episode of task %s is lost: %s", spec.task.id, detail, exc_info=True)
        return lost_episode(spec, detail)


def lost_episode(spec: EpisodeSpec, detail: str) -> Episode:
    """Returns an episode that the infrastructure lost; `detail` says how."""
    task, outcome = spec.task, "infrastructure"
    return Episode(
        task.id, task.family, task.split, spec.seed, Transcript(), None, outcome, detail=detail, effort=spec.effort
    )


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
