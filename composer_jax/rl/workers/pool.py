"""WorkerPool: gives episodes to rollout workers, which come and go. It belongs to the trainer, beside the engine.

A worker that is lost costs its running episodes another attempt elsewhere, with the same seed: the loss has nothing to
do with what was sampled, so new random numbers would only favour episodes that are too short to be hit.
"""

import asyncio
import contextlib
import itertools
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from absl import logging

from composer_jax.agent.episode import Episode
from composer_jax.agent.episode_context import EpisodeContext
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.frames import Frame, FrameError
from composer_jax.rl.rollout import lost_episode, play_episode
from composer_jax.rl.workers.channel import SILENCE_S, Channel, ChannelClosed, RemoteError
from composer_jax.rl.workers.handshake import WORKERS, HandshakeError, accept
from composer_jax.rl.workers.messages import sample_to_frame, spec_to_json
from composer_jax.rl.workers.served_episode import ServedEpisode
from composer_jax.rl.workers.worker_setup import WorkerSetup
from composer_jax.sampler.policy import Policy
from composer_jax.tasks.result_cache import ResultCache

CLOSE_S = 5.0
"""Seconds in which workers close their connections after the end of the run."""


@dataclass(frozen=True)
class PoolOptions:
    """Where a trainer listens for workers, and how long it waits for them.

    Raises UserError for a number out of range.
    """

    host: str = "127.0.0.1"
    """Address of the interface to listen on; "" is all of them."""
    port: int = 0
    """Port to listen on; 0 takes a free one."""
    local_episodes: int = 0
    """Episodes that this machine plays at once, beside the workers."""
    patience_s: float = 300.0
    """Seconds that an episode waits while there is no worker at all, before the run ends with a sentence."""
    silence_s: float = SILENCE_S
    """Seconds of silence after which a worker is lost for the trainer, and the trainer for a worker."""
    retries: int = 2
    """Further attempts at an episode whose worker was lost; it is not scored if all of them are lost."""

    def __post_init__(self) -> None:
        if self.local_episodes < 0:
            raise UserError(f"--local_episodes={self.local_episodes} is negative; 0 leaves all episodes to workers.")
        if not 0 <= self.port < 2**16:
            raise UserError(f"port {self.port} of --listen is none; use 1 to 65535.")
        if not self.patience_s > 0:
            raise UserError(f"--worker_patience={self.patience_s:g} ends the run at once; use seconds above 0.")


class WorkerLost(Exception):
    """A worker is gone with the episodes that it played; the text says why."""


class WorkerPool:
    """Plays episodes on workers. An asynchronous context manager; leaving it ends the workers.

    Attributes:
      port: where it listens.
      losses: workers that were lost.
    """

    def __init__(self, options: PoolOptions, setup: WorkerSetup, token: str, context: EpisodeContext):
        """setup: what workers need for episodes.

        token: what a worker must know to be let in (handshake.py). context: what the episodes of this machine need; its
        cache counts the sandbox runs of all workers.
        """
        self.port, self.losses = 0, 0
        self._options, self._token, self._context = options, token, context
        # Both ends send heartbeats as often as the silence that the trainer bears requires.
        self._welcome = {"setup": asdict(setup), "silence_s": options.silence_s}
        self._workers: list[_LocalWorker | _RemoteWorker] = []
        self._waiting: deque[asyncio.Future[_LocalWorker | _RemoteWorker]] = deque()
        self._deadline: asyncio.TimerHandle | None = None
        self._connections: dict[asyncio.Task, Channel | None] = {}
        self._changed = asyncio.Event()

    @property
    def workers(self) -> list[str]:
        """Names of the workers that are connected, this machine included if it plays episodes."""
        return [worker.name for worker in self._workers]

    async def wait_for(self, count: int, timeout: float) -> None:
        """Waits until so many workers beside this machine are ready; logs a warning if they are not after `timeout` s.

        Without it a machine that is ready plays all episodes before another one takes its share.
        """
        try:
            async with asyncio.timeout(timeout):
                while sum(not isinstance(worker, _LocalWorker) for worker in self._workers) < count:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            there = ", ".join(self.workers) or "none"
            logging.warning("After %g s only these of %d workers are ready: %s.", timeout, count, there)

    async def play(self, spec: EpisodeSpec, policy: Policy, *, ahead: bool = False) -> Episode:
        """Plays an episode on the worker with the most room; waits while there is none.

        ahead: whether it goes before all other episodes that wait.

        Raises:
          UserError: no worker was there for options.patience_s, or the task cannot be played on a worker.
          RemoteError: the worker has failed otherwise.
          Exception: what the policy raises.
        """
        why = ""
        for _ in range(self._options.retries + 1):
            worker = await self._acquire(ahead)
            try:
                return await worker.play(spec, policy)
            except WorkerLost as error:
                why = str(error)
            finally:
                worker.room += 1
                self._assign()
        detail = f"{self._options.retries + 1} workers were lost, the last one: {why}"
        logging.warning("An episode of task %s is lost: %s", spec.task.id, detail)
        return lost_episode(spec, detail)

    async def __aenter__(self) -> Self:
        """Listens. Raises UserError if the address cannot be listened on."""
        options = self._options
        try:
            self._server = await self._listen(options.host, options.port)
        except OSError as error:
            raise UserError(
                f"--listen={options.host}:{options.port} cannot be listened on ({error.strerror or error}); choose "
                "another port or an address of this machine."
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]
        if options.local_episodes:
            self._workers.append(_LocalWorker(self._context, options.local_episodes))
        return self

    async def _listen(self, host: str, port: int) -> asyncio.Server:
        if host:
            return await asyncio.start_server(self._connect, host, port)
        # One socket serves IPv4 and IPv6. Two sockets with port 0 would get two ports, and workers know only one.
        both = {"family": socket.AF_INET6, "dualstack_ipv6": True} if socket.has_dualstack_ipv6() else {}
        return await asyncio.start_server(self._connect, sock=socket.create_server(("", port), **both))

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        if self._deadline is not None:
            self._deadline.cancel()
        connections = dict(self._connections)
        for task, channel in connections.items():
            if channel is None:  # in its handshake
                task.cancel()
            else:
                channel.notify("end", {})
        await _wait(connections, CLOSE_S)
        for channel in connections.values():
            if channel is not None:
                channel.abort("it did not end with the run")
        await _wait(connections, None)

    # -- who plays next ------------------------------------------------------------------------------------------

    async def _acquire(self, ahead: bool) -> "_LocalWorker | _RemoteWorker":
        """Takes a place at a worker; the first who waits is the first who gets one, unless somebody goes ahead."""
        turn: asyncio.Future[_LocalWorker | _RemoteWorker] = asyncio.get_running_loop().create_future()
        self._waiting.insert(0 if ahead else len(self._waiting), turn)
        self._assign()
        try:
            return await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                turn.result().room += 1  # this caller had got the place: pass it on
            else:
                turn.cancel()
            self._assign()
            raise

    def _assign(self) -> None:
        """Gives places at workers to those who wait, and sets the time until which they wait for a first worker."""
        workers = [worker for worker in self._workers if not worker.is_lost]
        while self._waiting:
            if self._waiting[0].done():
                self._waiting.popleft()
                continue
            worker = max(workers, key=lambda worker: worker.room, default=None)
            if worker is None or worker.room <= 0:
                break
            worker.room -= 1
            self._waiting.popleft().set_result(worker)
        if workers or not self._waiting:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
        elif self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(self._options.patience_s, self._give_up)

    def _give_up(self) -> None:
        self._deadline = None
        sentence = (
            f"No rollout worker was connected for {self._options.patience_s:g} s; start one with python -m "
            f"launch.worker --connect=HOST:{self.port} --token_file=FILE, and the same command continues."
        )
        while self._waiting:
            if not (turn := self._waiting.popleft()).done():
                turn.set_exception(UserError(sentence))

    # -- who comes and goes --------------------------------------------------------------------------------------

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a server's connections are tasks"
        self._connections[task] = None
        try:
            peer = writer.get_extra_info("peername")
            try:
                description = await accept(reader, writer, self._token, WORKERS, self._welcome)
                name, episodes = f"{description['name']}", int(description["episodes"])
            except (HandshakeError, FrameError, TimeoutError, OSError, asyncio.IncompleteReadError) as error:
                logging.warning("A connection from %s is refused: %s", peer, error or type(error).__name__)
                return
            except (KeyError, TypeError, ValueError) as error:
                logging.warning("A worker at %s does not say what it is: %r", peer, error)
                return
            worker = _RemoteWorker(name, episodes, self._context.cache, self._add)
            worker.channel = Channel(reader, writer, worker.handlers, silence_s=self._options.silence_s)
            self._connections[task] = worker.channel
            await self._serve(worker)
        finally:
            del self._connections[task]
            writer.close()

    async def _serve(self, worker: "_RemoteWorker") -> None:
        try:
            reason = await worker.channel.run()
        finally:
            if worker in self._workers:
                self._workers.remove(worker)
        if self._server.is_serving():
            self.losses += 1
            logging.warning("Worker %s is lost: %s.", worker.name, reason)
            self._assign()

    def _add(self, worker: "_RemoteWorker") -> None:
        """Lets a worker play whose sandboxes are ready."""
        self._workers.append(worker)
        self._changed.set()
        logging.info("Worker %s plays up to %d episodes at once.", worker.name, worker.room)
        self._assign()


class _LocalWorker:
    """This machine as a worker."""

    name, is_lost = "this machine", False

    def __init__(self, context: EpisodeContext, episodes: int):
        self.room, self._context = episodes, context  # room: episodes that it can play beside those that it plays

    async def play(self, spec: EpisodeSpec, policy: Policy) -> Episode:
        return await play_episode(spec, policy, self._context)


class _RemoteWorker:
    """The trainer's end of the connection to a worker."""

    channel: Channel

    def __init__(self, name: str, episodes: int, cache: ResultCache, on_ready: Callable[["_RemoteWorker"], None]):
        self.name, self.room, self._cache, self._on_ready = name, episodes, cache, on_ready
        self._numbers = itertools.count()
        self._episodes: dict[int, ServedEpisode] = {}
        self.handlers = {"ready": self._ready, "open": self._open, "sample": self._sample, "close": self._close}

    @property
    def is_lost(self) -> bool:
        return bool(self.channel.reason)

    async def play(self, spec: EpisodeSpec, policy: Policy) -> Episode:
        """Raises WorkerLost if the connection ends first; for the rest see WorkerPool.play."""
        number, served = next(self._numbers), ServedEpisode(policy)
        self._episodes[number] = served
        call = asyncio.create_task(self.channel.call("play", {"episode": number, "spec": spec_to_json(spec)}))
        try:
            await asyncio.wait([call, served.failure], return_when=asyncio.FIRST_COMPLETED)
            if served.failure.done():
                raise served.failure.result()
            reply, arrays = self._result(call)
        finally:
            del self._episodes[number]
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):  # it was reported above, or nobody waits
                await call
            await served.close()
        self._cache.runs += reply["runs"]
        self._cache.hits += reply["hits"]
        try:
            return Episode.from_frame(reply["episode"], arrays)
        except FrameError as error:
            raise RemoteError(f"worker {self.name} sent {error}") from error

    def _result(self, call: asyncio.Task[Frame]) -> Frame:
        try:
            return call.result()
        except ChannelClosed as error:
            raise WorkerLost(f"{self.name}: {error}") from error
        except (UserError, RemoteError) as error:
            raise type(error)(f"worker {self.name}: {error}") from error

    def _served(self, body: dict[str, Any]) -> ServedEpisode:
        if body["episode"] not in self._episodes:
            raise LookupError(f"episode {body['episode']} has ended")
        return self._episodes[body["episode"]]

    async def _ready(self, body: dict[str, Any], arrays: list[np.ndarray]) -> Frame:
        self._on_ready(self)
        return {}, []

    async def _open(self, body: dict[str, Any], arrays: list[np.ndarray]) -> Frame:
        session, max_model_len = await self._served(body).open(body["seed"])
        return {"session": session, "max_model_len": max_model_len}, []

    async def _sample(self, body: dict[str, Any], arrays: list[np.ndarray]) -> Frame:
        params = SamplingParams(**body["params"])
        served = self._served(body)
        return sample_to_frame(await served.sample(body["session"], body["start"], arrays[0], params, body["branch"]))

    async def _close(self, body: dict[str, Any], arrays: list[np.ndarray]) -> Frame:
        if served := self._episodes.get(body["episode"]):  # it may have ended
            served.close_session(body["session"])
        return {}, []


async def _wait(tasks: dict[asyncio.Task, Channel | None], timeout: float | None) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=timeout)
