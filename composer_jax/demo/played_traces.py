"""Traces of scripted sessions: episodes that are played once per run and then read from a file."""

import abc
import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from composer_jax.agent.episode import Episode, run_episode
from composer_jax.agent.episode_context import EpisodeContext, EpisodeSettings
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.data.token_source import Trace
from composer_jax.data.trace_file import read_traces, write_traces
from composer_jax.event_loop import EventLoop, run_all
from composer_jax.observe.progress import Progress
from composer_jax.sampler.policy import Session
from composer_jax.sandbox import LocalSandboxPool
from composer_jax.stages.trace_sources import SourceContext
from composer_jax.tasks.task import Task

Job = tuple[EpisodeSpec, Session]
"""An episode, and the session that plays it."""


async def play_jobs(
    jobs: Sequence[Job], context: EpisodeContext, concurrency: int, on_done: Callable[[Episode], None] | None = None
) -> list[Episode]:
    """Plays one episode per job, in the order of the jobs: a function of the arguments, not of the timing.

    concurrency: episodes in flight. on_done: called with each episode as it ends, in no particular order.
    """
    slots = asyncio.Semaphore(concurrency)

    async def one(spec: EpisodeSpec, session: Session) -> Episode:
        async with slots:
            episode = await run_episode(spec, session, context)
        if on_done is not None:
            on_done(episode)
        return episode

    return await run_all(one(*job) for job in jobs)


def play_with_progress(
    jobs: Sequence[Job], chat: ChatFormat, settings: EpisodeSettings, concurrency: int
) -> list[Episode]:
    """Plays jobs in sandboxes of this host, with a progress bar. concurrency: episodes in flight."""

    async def play(progress: Progress) -> list[Episode]:
        async with LocalSandboxPool(size=concurrency) as pool:
            context = EpisodeContext(chat, pool, settings)
            return await play_jobs(jobs, context, concurrency, lambda episode: progress.update(1))

    with EventLoop() as loop, Progress(len(jobs), "trace", "expert traces") as progress:
        return loop.run(play(progress))


class PlayedTraces(abc.ABC):
    """Base class of ConversationSources that play episodes and keep them in a file of the run's data folder.

    See stages/trace_sources.py.
    """

    def __init__(self, context: SourceContext, file: str):
        self.context, self.path = context, context.folder / file

    @abc.abstractmethod
    def play(self) -> list[tuple[Task, Episode]]:
        """Plays all episodes, in sandboxes, with a progress bar; returns the tasks with their episodes."""

    @abc.abstractmethod
    def mean_rewards(self, episodes: list[Episode]) -> dict[str, np.float32]:
        """Returns the mean rewards of the episodes that `play` returned, by their names in the file."""

    def traces(self) -> list[Trace]:
        """Returns every branch of every episode as (tokens int32 [n], trained bool [n]).

        Process 0 plays the episodes; the others need no sandbox.
        """
        return list(read_traces(self.context.make_shared(self._write)))

    def _write(self) -> Path:
        if self.path.exists():
            return self.path
        episodes = [episode for _, episode in self.play()]
        rows = [row for episode in episodes for row in episode.transcript.rows()]
        return write_traces(self.path, [(row.tokens, row.trained) for row in rows], self.mean_rewards(episodes))
