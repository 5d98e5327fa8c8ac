"""A serving over several processes: process 0 schedules, and the others run the programs of the engines that they hold.

Nothing but device calls needs the other processes. Process 0 serves all engines. It sends the name and the NumPy inputs
of each call (parallel/command_channel.py) to the processes of the engine before it starts the call itself, if it has
devices of that engine, and gets the rows that the others computed back the same way. They start calls as the commands
come, and a thread for each engine sends what its calls return, in their order. Another thread answers what process 0
asks, such as whether a version of the weights could be read. The weights, the cache and the ends of rows are global
arrays of which every process holds its shards already. A WeightUpdate waits until no device call of any engine is
outstanding, on one process as well.
"""

import asyncio
import contextlib
import dataclasses
import queue
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import jax
import numpy as np

from composer_jax.errors import OtherProcessError, UserError
from composer_jax.models.model_def import Params
from composer_jax.parallel.command_channel import CommandLane, CommandReceiver, CommandSender, failure_sentence
from composer_jax.parallel.failure import wait_for_failure
from composer_jax.parallel.processes import process_count
from composer_jax.sampler.engine_weights import EngineWeights
from composer_jax.sampler.runner import Runner, shards_here
from composer_jax.sampler.weight_checksums import WeightChecksum, WeightChecksums

WeightsOfVersion = Callable[[int], tuple[Params, Params]]
"""Weight version -> (params, router_bias): the global arrays that process 0 passes to update_serving with it."""

OnCall = Callable[[dict[str, Any], list[np.ndarray]], object]
"""Header and arrays of Sampler.call_followers -> whatever the other processes do with them."""

OnAsk = Callable[[dict[str, Any]], dict[str, Any]]
"""Question of Sampler.ask_followers -> answer, both plain JSON. Called in a thread, beside device calls."""

REPORT_S = 2.0
"""Seconds in which a process that dies is reported to those whose device programs fail because of it."""

UpdateMode = Literal["keep", "recompute", "drain"]


@dataclasses.dataclass(eq=False)
class WeightUpdate:
    """The arguments of Sampler.update_serving, the future that it awaits, and the engines that it waits for."""

    params: Params
    router_bias: Params
    version: int
    mode: UpdateMode
    copy: bool
    checksums: WeightChecksums | None
    n_busy: int
    """Engines that may have outstanding device calls."""
    apply: Callable[["WeightUpdate"], Awaitable[None]]
    """Installs the weights in all engines."""
    done: asyncio.Future[None]
    over: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set when engines go on, with the new weights or without."""

    async def rest(self) -> None:
        """Called by each engine when none of its calls is outstanding; returns when it may go on.

        The last of them installs the weights in all, so that no two versions are sampled from at one time, and every
        process starts the programs of the conversion in the same place of their order.
        """
        self.n_busy -= 1
        if self.n_busy:
            await self.over.wait()
        else:
            await self.apply(self)

    def resolve(self, error: Exception | None = None) -> None:
        """Ends update_serving, with an exception if one is given."""
        self.over.set()
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class Leader:
    """Process 0 of a serving, as an asynchronous context manager. On a mesh of one process it does nothing."""

    def __init__(self, runners: Sequence[Runner], weights: EngineWeights, on_error: Callable[[], None]) -> None:
        """
        Args:
          runners: of all engines, in every process in the same order. weights: what installs weights in them.
          on_error: called in the event loop when another process fails or is gone; `check` then raises.
        """
        self._runners, self._weights, self._on_error = runners, weights, on_error
        self._sender: CommandSender | None = None
        self._failure = ""

    async def __aenter__(self) -> Self:
        """Waits until every other process follows."""
        if any(runner.mesh.is_multi_process for runner in self._runners):
            loop = asyncio.get_running_loop()
            self._sender = CommandSender(
                lambda _: loop.call_soon_threadsafe(self._on_error), lanes=len(self._runners) + 1
            )
            try:
                await asyncio.to_thread(self._sender.connect)
            except BaseException:
                self._sender.close("process 0 ended: it stopped waiting for the other processes")
                raise
            for number, runner in enumerate(self._runners):
                processes = {device.process_index for device in runner.mesh.devices.flat} - {0}
                runner.sender = CommandLane(self._sender, number, processes) if processes else None
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._sender is not None:
            for runner in self._runners:
                runner.sender = None
            self._sender.close(self._failure)

    @property
    def has_followers(self) -> bool:
        """Whether there are other processes, which must make every device call that this one makes."""
        return self._sender is not None

    def check(self) -> None:
        """Raises an OtherProcessError if another process failed or is gone."""
        if self._sender is not None and self._sender.error is not None:
            raise self._sender.error

    def fail(self, error: Exception) -> Exception:
        """Notes that `error` ends the serving in all processes; returns the error of the process that caused it."""
        if self._sender is None:
            return error
        cause = self._sender.cause_of(error)
        self._failure = self._failure or failure_sentence(cause)
        return cause

    async def install(self, update: WeightUpdate) -> bool:
        """Installs weights in every process, while no device call is outstanding; returns whether they were.

        Weights that cannot be installed raise in update_serving. The serving goes on if the old ones stay everywhere.
        """
        try:
            await asyncio.to_thread(self._install, update)
        except Exception as error:
            if self.has_followers or self._weights.version < 0:  # others may have the new ones, or all are lost
                raise
            update.resolve(error)
            return False
        return True

    def _install(self, update: WeightUpdate) -> None:
        options = {"copy": update.copy, "checksums": update.checksums}
        if self._sender is not None:
            checksums = update.checksums and [dataclasses.asdict(one) for one in update.checksums]
            self._sender.send({"install": update.version, **options, "checksums": checksums})
        self._weights.install(update.params, update.router_bias, update.version, **options)

    def send_call(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray], process: int | None) -> None:
        """Makes every other process, or one of them, call its OnCall."""
        assert self._sender is not None, "a single process has no channel"
        self._sender.send({"call": dict(header)}, arrays, processes=None if process is None else [process])

    async def ask(self, question: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the answers of the other processes' OnAsk; device calls go on meanwhile. One question at a time.

        Raises OtherProcessError if one of them fails or is gone.
        """
        if self._sender is None:
            return []
        sender, lane = self._sender, len(self._runners)
        await asyncio.to_thread(sender.send, {"ask": dict(question)})
        answers = await asyncio.to_thread(sender.collect_from, range(1, process_count()), lane)
        return [header["answer"] for header, _ in answers.values()]


def follow(
    runners: Sequence[Runner],
    engine_weights: EngineWeights,
    weights: WeightsOfVersion | None,
    on_call: OnCall | None,
    on_ask: OnAsk | None,
) -> None:
    """Runs the device calls of process 0 until its serving ends. See Sampler.follow."""
    with CommandReceiver() as commands, contextlib.ExitStack() as stack:
        reply_with = [
            stack.enter_context(_replying(commands, number)) if runner.is_here else None
            for number, runner in enumerate(runners)
        ]
        try:
            for header, inputs in commands:
                if "install" in header:
                    _install(engine_weights, header, weights)
                    continue
                if "call" in header:
                    if on_call is None:
                        raise UserError("process 0 calls its followers; pass `on_call` to Sampler.follow.")
                    on_call(header["call"], inputs)
                    continue
                if "ask" in header:
                    _start_answer(commands, header["ask"], on_ask, lane=len(runners))
                    continue
                number = header["lane"]
                out, reply = runners[number].start_program(header["program"], *inputs, width=header["width"]), None
                if jax.tree.leaves(out) and (reply := reply_with[number]) is not None:
                    reply(out)
        except OtherProcessError:
            # It does not wait for calls that run, as process 0 does: their collectives may lack a process that is gone.
            for runner in runners:
                runner.reset_cache()
            raise
        except jax.errors.JaxRuntimeError as error:
            # A collective fails when a process that takes part in it dies, which process 0 reports.
            sentence = wait_for_failure(REPORT_S)
            if sentence is None:
                raise
            raise OtherProcessError(sentence) from error


def _start_answer(commands: CommandReceiver, question: dict[str, Any], on_ask: OnAsk | None, lane: int) -> None:
    if on_ask is None:
        raise UserError("process 0 asks its followers; pass `on_ask` to Sampler.follow.")

    def answer() -> None:
        try:
            commands.reply({"answer": on_ask(question)}, [], lane=lane)
        except Exception as error:
            commands.interrupt(error)

    threading.Thread(target=answer, daemon=True, name="answerer").start()


@contextlib.contextmanager
def _replying(commands: CommandReceiver, lane: int) -> Iterator[Callable[[Any], None]]:
    """Yields a function that replies with what a call of an engine returns, when it is computed, and does not wait.

    An error of the thread that waits is raised by the iteration over `commands`.
    """
    outputs: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def reply() -> None:
        try:
            while (out := outputs.get()) is not None:
                commands.reply(*shards_here(out), lane=lane)
        except Exception as error:
            commands.interrupt(error)

    # A daemon, since a call that waits for a process that failed never ends.
    threading.Thread(target=reply, daemon=True, name="replier").start()
    try:
        yield outputs.put
    finally:
        outputs.put(None)


def _install(engine_weights: EngineWeights, header: Mapping[str, Any], weights: WeightsOfVersion | None) -> None:
    version, checksums = header["install"], header["checksums"]
    if weights is None:
        raise UserError(f"process 0 installs weights of version {version}; pass `weights` to Sampler.follow.")
    checksums = checksums and tuple(WeightChecksum(**one | {"shape": tuple(one["shape"])}) for one in checksums)
    engine_weights.install(*weights(version), version, copy=header["copy"], checksums=checksums)
