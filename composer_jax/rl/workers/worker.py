"""A rollout worker: connects to a trainer, plays the episodes that it gives, and connects again after a loss."""

import asyncio
import concurrent.futures
import os
import platform
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from absl import logging

from composer_jax.agent.episode_context import EpisodeContext
from composer_jax.errors import UserError
from composer_jax.frames import Frame, FrameError
from composer_jax.rl.rollout import play_episode
from composer_jax.rl.workers.channel import Channel
from composer_jax.rl.workers.handshake import WORKERS, HandshakeError, join
from composer_jax.rl.workers.messages import spec_from_json
from composer_jax.rl.workers.remote_policy import RemotePolicy
from composer_jax.rl.workers.worker_setup import WorkerSetup

RETRY_S = 1.0
"""Seconds between attempts to connect."""
EPISODES_PER_CPU = 4
"""Episodes at once per CPU core by default: an episode waits for tokens most of its time; its sandbox is idle then."""


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker does. Raises UserError for a number out of range."""

    host: str
    """Where the trainer listens."""
    port: int
    """Its port."""
    token: str
    """The secret that trainer and workers share."""
    episodes: int = 0
    """Episodes that play at once, each with a sandbox or a container; 0 takes EPISODES_PER_CPU per core of this
    process."""
    patience_s: float = 300.0
    """Seconds without a trainer after which the worker gives up."""

    def __post_init__(self) -> None:
        if self.episodes < 0:
            raise UserError(f"--episodes={self.episodes} is negative; 0 lets the worker choose.")
        if not 0 < self.port < 2**16:
            raise UserError(f"port {self.port} of --connect is none; use 1 to 65535.")

    @property
    def concurrency(self) -> int:
        """Episodes at once on this machine."""
        return self.episodes or EPISODES_PER_CPU * len(os.sched_getaffinity(0))


MakeContext = Callable[[WorkerSetup, int], AbstractAsyncContextManager[EpisodeContext]]


async def run_worker(options: WorkerOptions, make_context: MakeContext = WorkerSetup.episode_context) -> None:
    """Plays episodes until the trainer ends its run. Cancelling it returns the sandboxes.

    Raises UserError if no trainer answers for options.patience_s, it has another token or version, or this machine
    cannot build sandboxes.

    Args:
      make_context: (setup, number of sandboxes) -> what episodes need.
    """
    is_over = False
    while not is_over:
        reader, writer, welcome = await _join(options)
        try:
            setup = WorkerSetup.from_json(welcome["setup"])
            async with make_context(setup, options.concurrency) as context:
                is_over = await _serve(reader, writer, options, context, welcome["silence_s"])
        finally:
            writer.close()


async def _join(options: WorkerOptions) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, dict[str, Any]]:
    """Connects to the trainer, as often as it takes; returns its welcome, too (pool.py)."""
    address, clock = f"{options.host}:{options.port}", asyncio.get_running_loop().time
    description = {"name": f"{platform.node()}:{os.getpid()}", "episodes": options.concurrency}
    deadline = clock() + options.patience_s
    while True:
        writer = None
        try:
            reader, writer = await asyncio.open_connection(options.host, options.port)
            return reader, writer, await join(reader, writer, options.token, WORKERS, description)
        except HandshakeError as error:
            raise UserError(f"{address} is not a trainer for this worker: {error}.") from error
        except (OSError, FrameError, TimeoutError, asyncio.IncompleteReadError) as error:
            if writer is not None:
                writer.close()
            if clock() + RETRY_S > deadline:
                why = str(error) or type(error).__name__
                raise UserError(
                    f"No trainer has answered at {address} for {options.patience_s:g} s ({why}); start launch.rl there "
                    "with --listen, or correct --connect."
                ) from error
        except BaseException:
            if writer is not None:
                writer.close()
            raise
        await asyncio.sleep(RETRY_S)


async def _serve(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    options: WorkerOptions,
    context: EpisodeContext,
    silence_s: float,
) -> bool:
    """Plays what comes over one connection; returns whether the trainer has ended its run."""
    desk = _Desk(context, options.concurrency)
    channel = Channel(reader, writer, {"play": desk.play, "end": desk.end}, silence_s=silence_s)
    desk.channel = channel
    channel.notify("ready", {})  # not before: a machine that cannot build sandboxes must get no episodes
    logging.info("Plays up to %d episodes at once for %s:%d.", options.concurrency, options.host, options.port)
    reason = await channel.run()
    if not desk.is_over:
        logging.warning("The trainer at %s:%d is lost: %s.", options.host, options.port, reason)
    return desk.is_over


class _Desk:
    """The handlers of a worker's channel."""

    channel: Channel

    def __init__(self, context: EpisodeContext, episodes: int):
        self.is_over = False
        self._context, self._turns = context, asyncio.Semaphore(episodes)
        self._reported_runs = self._reported_hits = 0

    async def play(self, body: Mapping[str, Any], arrays: list[np.ndarray]) -> Frame:
        """Plays an episode; replies with it and what the sandboxes have run since the last reply."""
        # The trainer gives the place of a cancelled episode away before its sandboxes are returned.
        async with self._turns:
            policy = RemotePolicy(self.channel, body["episode"])
            episode = await play_episode(spec_from_json(body["spec"]), policy, self._context)
        cache = self._context.cache
        runs, hits = cache.runs - self._reported_runs, cache.hits - self._reported_hits
        self._reported_runs, self._reported_hits = cache.runs, cache.hits
        header, results = episode.to_frame()
        return {"episode": header, "runs": runs, "hits": hits}, results

    async def end(self, body: Mapping[str, Any], arrays: list[np.ndarray]) -> Frame:
        self.is_over = True
        self.channel.close("the trainer has ended its run")
        return {}, []


class WorkerThread:
    """Plays episodes of a trainer from the beginning of a block to its end, or to that of the trainer's run.

    A worker that fails is logged, and the trainer's other workers play its episodes.
    """

    def __init__(self, options: WorkerOptions, make_context: MakeContext = WorkerSetup.episode_context):
        """See run_worker."""
        self._options, self._make_context = options, make_context
        self._started: concurrent.futures.Future[asyncio.Task] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="rollout-worker", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._task = self._started.result()
        return self

    def __exit__(self, *error: object) -> None:
        """Returns when the worker's sandboxes are gone."""
        if self._thread.is_alive():
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._work())

    async def _work(self) -> None:
        task = asyncio.create_task(run_worker(self._options, self._make_context))
        self._started.set_result(task)
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()):
            logging.warning("This process plays no more episodes: %s", error, exc_info=error)
