"""Sampler: the rollout engine. One task schedules, starts, finishes and commits device calls; requests come and go.

The next calls start while one is outstanding (device_calls.py), so the devices compute while the host reads, commits,
streams and schedules.
"""

import asyncio
import contextlib
import dataclasses
import functools
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
from jax.sharding import Mesh

from composer_jax.errors import OtherProcessError, UserError
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import ModelDef, Params
from composer_jax.observe.progress import Progress
from composer_jax.parallel.mesh import batch_shards
from composer_jax.parallel.processes import is_first_process
from composer_jax.sampler.config import SamplerConfig, make_limits
from composer_jax.sampler.detokenizer import Decode
from composer_jax.sampler.device_calls import DeviceCalls
from composer_jax.sampler.drafts import Speculation
from composer_jax.sampler.policy import SamplingParams
from composer_jax.sampler.request import Request, RequestHandle
from composer_jax.sampler.request_table import RequestTable
from composer_jax.sampler.rollout_weights import rollout_model_def
from composer_jax.sampler.runner import RowScores, Runner
from composer_jax.sampler.scheduler import Scheduler
from composer_jax.sampler.sequence import CacheLease, SchedulerOutput
from composer_jax.sampler.session import EngineSession
from composer_jax.sampler.session_gate import SessionGate
from composer_jax.sampler.several_processes import (
    Leader,
    OnAsk,
    OnCall,
    UpdateMode,
    WeightsOfVersion,
    WeightUpdate,
    follow,
)
from composer_jax.sampler.start_schedule import StepOutput, start_schedule
from composer_jax.sampler.watchdog import Activity, Watchdog
from composer_jax.sampler.weight_checksums import WeightChecksums

PauseMode = Literal["keep", "wait", "abort"]


@dataclasses.dataclass(frozen=True)
class SamplerStats:
    """What a sampler is doing, and has done."""

    waiting: int
    running: int
    preemptions: int
    """Running requests that gave their pages to others, and ran again later."""
    pages: int
    held_pages: int
    """Pages of running requests and open sessions; the others are free, or free when they are needed."""
    live_tokens: int
    """Tokens of running requests and open sessions, those in shared pages once."""
    drafted: tuple[int, ...]
    """Draft tokens that were verified, by their place in the draft."""
    accepted: tuple[int, ...]
    """Those of them that were sampled."""


class Sampler:
    """A Policy (sampler/policy.py) on the devices of a mesh: continuous batching over a paged cache of prefixes.

    Open and use sessions inside `async with sampler.serving():`. On a mesh over several processes, each
    of them makes, updates and warms up the sampler; then process 0 serves, and the others call `follow`.
    """

    def __init__(
        self,
        definition: ModelDef,
        mesh: Mesh,
        config: SamplerConfig,
        *,
        end_tokens: Sequence[int],
        decode: Decode | None = None,
        most_sessions: int | None = None,
        only_fitting: bool = False,
    ) -> None:
        """
        Args:
          mesh: the run's mesh; with config.mesh the sampler makes its own over the same devices.
          end_tokens: ids that end a message, such as ChatFormat.end_tokens.
          decode: text of token ids, which requests with stop strings need.
          most_sessions: that are open at once, whatever the cache holds; None: no such bound.
          only_fitting: opens no more sessions than there are slots, and none that may not fit into the cache. Then no
            session gives up its pages, and no bit of what it samples depends on how long tools take.

        Raises:
          UserError: sizes of `config` that do not fit the mesh or the model.
        """
        if config.mesh is not None:
            mesh = config.mesh.make_mesh(list(mesh.devices.flat))
        definition = rollout_model_def(definition, config)
        if config.max_model_len > definition.config.max_context:
            raise UserError(
                f"A sampler max_model_len of {config.max_model_len} tokens exceeds the model's max_context="
                f"{definition.config.max_context}."
            )
        self.definition, self.mesh, self.config = definition, mesh, config
        self.end_tokens, self.decode = tuple(end_tokens), decode
        self.version, self.is_serving = -1, False
        self.decoded_tokens, self.prefilled_tokens = 0, 0
        self.prefill_places = 0
        """Rows x tokens of the prefill calls: prefilled tokens and padding."""
        self.limits = make_limits(config, batch_shards(mesh), definition.config)
        self._runner = Runner(definition, mesh, config, self.limits, self.end_tokens)
        self.learner_checksums = self._runner.checksum_program.of_learner
        self._scheduler = Scheduler(self.limits)
        self._calls = DeviceCalls(self.limits.most_ahead)
        self._requests = RequestTable(self._scheduler, self._runner, self._calls)
        self._new_gate = functools.partial(
            SessionGate,
            self.limits,
            self._raise_if_ended,
            lambda: bool(self._scheduler.running or self._scheduler.waiting),
            lambda: self._scheduler.n_held_pages,
            most_sessions=most_sessions,
            only_fitting=only_fitting,
        )
        self._sessions = self._new_gate()
        self._update: WeightUpdate | None = None
        self._speculation = Speculation(config.drafts, config.draft_tokens) if config.drafts else None
        self._forgets_cache = False
        """Whether the cache is to be forgotten when no call is outstanding."""
        self._watchdog = Watchdog(config.stall_seconds, self._activity)

    # -- weights -------------------------------------------------------------------------------------------------

    def update(
        self,
        params: Params,
        router_bias: Params,
        version: int,
        *,
        copy: bool = True,
        checksums: WeightChecksums | None = None,
    ) -> None:
        """Installs the weights in this sampler's layout and dtypes; later tokens carry `version`.

        What is cached is forgotten. Call it while the sampler is not serving.

        Args:
          copy: False shares the arrays that have this layout and dtype already; the caller then never donates them.
          checksums: of this version, from `learner_checksums` when it was made; None takes those of `params`.

        Raises:
          ValueError: weights of another network.
          UserError: what would be installed has other checksums, or leaves no room for the cache; the old weights stay.
        """
        if self.is_serving:
            raise RuntimeError("this sampler is serving; use update_serving inside the block")
        self._runner.install(params, router_bias, version, copy=copy, checksums=checksums)
        self._scheduler.recompute()
        self.version = version

    def release(self) -> None:
        """Frees the memory of weights and cache until the next `update`. Call it while the sampler is not serving."""
        assert not self.is_serving, "requests need the weights"
        self._runner.release()
        self.version = -1

    async def update_serving(
        self,
        params: Params,
        router_bias: Params,
        version: int,
        *,
        mode: UpdateMode = "recompute",
        copy: bool = True,
        checksums: WeightChecksums | None = None,
    ) -> None:
        """Installs weights when no device call of the serving is outstanding; later tokens then carry `version`.

        Args:
          params, router_bias: arrays, or HostTensors (host_weights.py), which replace the old weights one by one: a
            device then needs no memory beside them, and an error in the middle ends the serving.
          mode: "recompute": running requests go on with contexts that the new weights compute again. "keep": they go on
            with what the old weights computed, as do sessions that are open (PipelineRL, arXiv 2509.19128). "drain":
            running requests end with the old weights first, while others wait.
          copy, checksums: as for `update`; HostTensors need checksums.

        Raises:
          RuntimeError: the sampler does not serve, or another update waits for running requests to end.
          ValueError, UserError: as from `update`. The serving goes on; over several processes, it ends.
        """
        if not self.is_serving or self._update is not None:
            reason = "another update is waiting" if self.is_serving else "this sampler is not serving; call update"
            raise RuntimeError(reason)
        self._raise_if_ended()
        done = asyncio.get_running_loop().create_future()
        self._update = WeightUpdate(params, router_bias, version, mode, copy, checksums, done)
        self._work.set()
        await done

    def score(self, tokens: Sequence[int]) -> RowScores:
        """See Runner.score. A sampler that serves must be paused."""
        assert self.is_paused or not self.is_serving, "device calls of a serving would mix with those of the row"
        return self._runner.score(tokens)

    @property
    def checksums(self) -> WeightChecksums:
        """Those of the weights that the sampler holds; none before the first update."""
        return () if self._runner.installed is None else self._runner.installed[1]

    def reset_prefix_cache(self) -> None:
        """Forgets all that is cached; running requests compute their contexts again. For measurements.

        While the sampler serves, this happens before any further device call.
        """
        if self.error is None:
            self._forgets_cache = True
            self._work.set()
        else:
            self._scheduler.recompute()

    def warm_up(self, *, processed: bool = False) -> int:
        """Compiles all programs, so that nothing compiles later, and shows the progress; returns their number.

        Call `update` before; no session may be open.

        processed: whether requests with a temperature, top_k, top_p or min_p will come. Without it, their programs
          compile when the first of them is decoded.
        """
        calls = self._runner.warm_up_calls(processed)
        with Progress(len(calls), "program", "compile the sampler") as progress:
            for call in calls:
                call()
                progress.update()
        return len(calls)

    async def pause(self, mode: PauseMode = "keep", *, will_resume: bool = False) -> None:
        """Stops device calls until `resume`; returns when the last one has ended.

        Requests can be submitted meanwhile, and weights updated (not with mode="drain" while requests run).

        Args:
          mode: "keep": running requests wait, and go on after `resume`. "wait": they end first, while others wait.
            "abort": every request ends at once, with what it has sampled and the finish reason "cancelled".
          will_resume: the caller resumes by itself, so requests that wait meanwhile are not logged as a stall.
        """
        self._raise_if_ended()
        self._pause_mode, self._will_resume = mode, will_resume
        self._paused.clear()
        self._work.set()
        await self._paused.wait()
        self._raise_if_ended()

    def resume(self) -> None:
        """Goes on after `pause`, also one that still waits; does nothing if the sampler is not paused."""
        self._pause_mode = None
        self._paused.set()
        self._work.set()

    @property
    def is_paused(self) -> bool:
        """Whether `pause` was called and `resume` not yet."""
        return self.is_serving and self._pause_mode is not None

    @property
    def error(self) -> Exception | None:
        """What ended the serving; None while it goes on."""
        return self._error if self.is_serving else RuntimeError("this sampler does not serve")

    @property
    def busy_seconds(self) -> float:
        """Seconds with outstanding device calls, up to the last that started or finished."""
        return self._calls.busy_seconds

    @property
    def stats(self) -> SamplerStats:
        """Numbers of requests and pages at this moment."""
        scheduler, speculation = self._scheduler, self._speculation
        return SamplerStats(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            preemptions=scheduler.preemptions,
            pages=sum(pool.n_pages for pool in scheduler.pools),
            held_pages=scheduler.n_held_pages,
            live_tokens=scheduler.n_live_tokens,
            drafted=() if speculation is None else tuple(speculation.drafted),
            accepted=() if speculation is None else tuple(speculation.accepted),
        )

    # -- sessions ------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Self]:
        """Serves sessions inside the block.

        If serving fails, every pending request raises the exception, and so does every later one. Raises RuntimeError
        if no weights were installed by `update`, the sampler is serving already, or process 0 serves. The
        serving ends with an OtherProcessError if another process of the mesh failed or is gone.
        """
        if self.version < 0:
            raise RuntimeError("call Sampler.update before serving")
        if self.is_serving:
            raise RuntimeError("this sampler is serving already; open sessions inside the block that is running")
        if self.mesh.is_multi_process and not is_first_process():
            raise RuntimeError("process 0 serves; the other processes call Sampler.follow")
        self._error: Exception | None = None
        self._leaving, self._work = False, asyncio.Event()
        self._pause_mode: PauseMode | None = None
        self._will_resume, self._paused = False, asyncio.Event()
        self._sessions = self._new_gate()
        self.is_serving = True
        try:
            async with Leader(self._runner, self._work.set) as self._leader:
                server = asyncio.create_task(self._serve())
                try:
                    yield self
                finally:
                    # Cancelling would leave a device call running in its thread, next to those of the next serving.
                    self._leaving = True
                    self._work.set()
                    await server
        finally:
            self.is_serving = False

    def call_followers(
        self, header: Mapping[str, Any], arrays: Sequence[np.ndarray] = (), *, process: int | None = None
    ) -> None:
        """Makes every other process, or one of them, call the `on_call` of its `follow`, in order with device calls.

        It does not wait for them, but for room in the channel (parallel/command_channel.py: WAITING_BYTES).
        The sampler must be paused until this process has joined the collectives of that call. May be called from any
        thread. On a mesh of one process it does nothing. Raises OtherProcessError if another process failed or is gone.

        Args:
          header: plain JSON.
        """
        if self._leader.has_followers:
            assert self.is_paused, "device calls of a serving would mix with those of the call"
            self._leader.send_call(header, arrays, process)

    async def ask_followers(self, question: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns what every other process answers by the `on_ask` of its `follow`, while device calls go on.

        On a mesh of one process these are none. One question at a time. Raises OtherProcessError if another process
        failed or is gone.

        question: plain JSON.
        """
        return await self._leader.ask(question)

    def follow(
        self,
        weights: WeightsOfVersion | None = None,
        on_call: OnCall | None = None,
        on_ask: OnAsk | None = None,
    ) -> None:
        """Makes the device calls of process 0 until it leaves `serving`: what every other process does meanwhile.

        Args:
          weights: returns the weights of `update_serving`, which process 0 must not call without it.
          on_call: called with what process 0 passes to `call_followers`.
          on_ask: answers what process 0 passes to `ask_followers`.

        Raises:
          RuntimeError: no weights were installed by `update`, this is process 0, or the mesh is of one process.
          OtherProcessError: the serving failed. If process 0 disappears, this process exits with a sentence.
        """
        if self.version < 0 or is_first_process() or not self.mesh.is_multi_process:
            raise RuntimeError("call Sampler.update before; process 0 serves, and the others of its mesh follow")
        self.is_serving = True
        try:
            follow(self._runner, weights, on_call, on_ask, lambda version: setattr(self, "version", version))
        finally:
            self.is_serving = False

    async def open(self, seed: int, *, ahead: bool = False) -> EngineSession:
        """See TrainablePolicy.open. The memory of the cache bounds the open sessions (session_gate.py)."""
        gate = self._sessions
        place = await gate.open(ahead=ahead)
        return EngineSession(self.submit, self.config.max_model_len, seed, gate, place, self._close)

    def submit(self, request: Request) -> RequestHandle:
        """Queues a request; the handle gives its Sample, or what it samples as it does.

        Raises ValueError for an empty context, or one that leaves no room for a token, and UserError for token ids that
        the network does not have, or stop strings without a decoder.
        """
        self._raise_if_ended()
        tokens, params = np.asarray(request.tokens), request.params
        budget = _check_request(tokens, params, self.definition.config, self.config.max_model_len, self.decode)
        future = asyncio.get_running_loop().create_future()
        request = dataclasses.replace(request, tokens=array("i", tokens.astype(np.int32).tobytes()))
        handle = RequestHandle(request, budget, self.end_tokens, self.decode, future)
        self._requests.add(handle)
        future.add_done_callback(lambda _: self._work.set())  # a cancelled one frees its pages
        self._work.set()
        return handle

    def _close(self, lease: CacheLease) -> None:
        """Frees the pages of a session, also after the end of its serving."""
        self._requests.close(lease)
        self._work.set()

    def _raise_if_ended(self) -> None:
        if self._error is not None:
            raise self._error

    # -- the loop ------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        reason: Exception = RuntimeError("this sampler has stopped serving")
        self._watchdog.start()
        try:
            while not self._leaving:
                await self._serve_once()
            while self._calls:
                await self._calls.finish_oldest()
        except Exception as error:
            reason = self._leader.fail(error)
            self._scheduler.recompute()
            if not isinstance(reason, OtherProcessError):  # which may never run a program again
                await asyncio.to_thread(self._runner.wait)
                self._runner.reset_cache()
            if reason is not error:
                raise reason from error
            raise
        finally:
            self._watchdog.stop()
            self._calls.forget()
            self._error = reason
            self._sessions.end(reason)
            self._paused.set()
            if self._update is not None:
                self._update.resolve(reason)
            self._update = None
            self._requests.end_all(reason)
            self._forget_cache()

    async def _serve_once(self) -> None:
        """Starts calls, or else finishes the oldest ones, or else waits until there is something to do."""
        self._work.clear()
        self._leader.check()
        self._requests.free_done()
        if self._calls and (self._forgets_cache or self._is_updating() or self._is_pausing()):
            await self._finish_oldest()
            return  # what is wanted may have changed meanwhile
        self._forget_cache()
        if self._update is not None and self._is_updating():
            await self._apply(self._update)
            self._update = None
        elif self._is_pausing():
            if self._pause_mode == "abort":
                self._requests.end_all()
                self._pause_mode = "keep"  # requests that come during the pause wait for its end
            self._paused.set()
            await self._work.wait()
        elif not self._calls.is_full and (schedule := self._schedule()):
            await self._start(schedule)
        elif self._calls:
            await self._finish_oldest()
        else:
            await self._work.wait()

    def _schedule(self) -> SchedulerOutput:
        return self._scheduler.schedule(admit=self._update is None and self._pause_mode is None)

    async def _start(self, schedule: SchedulerOutput) -> None:
        handles = self._requests.handles(schedule.decode)
        arguments = self._runner, self._speculation, schedule, handles, self.version
        commit = functools.partial(self._commit, schedule)
        await self._calls.start(schedule, start_schedule, *arguments, commit=commit)
        self._scheduler.start(schedule)

    async def _finish_oldest(self) -> None:
        await self._calls.finish_oldest()
        await asyncio.sleep(0)  # whoever got an answer may ask again before the next schedule

    async def _commit(self, schedule: SchedulerOutput, results: StepOutput) -> None:
        self.prefilled_tokens += sum(chunk.count for chunk in schedule.prefill)
        rows, length = schedule.prefill_shape or (0, 0)
        self.prefill_places += self.limits.shards * rows * length
        self.decoded_tokens += await self._requests.commit(schedule, results)

    def _forget_cache(self) -> None:
        """Does what reset_prefix_cache has asked for."""
        if self._forgets_cache:
            self._scheduler.recompute()
        self._forgets_cache = False

    def _activity(self) -> Activity:
        update = None if self._update is None else (self._update.version, self._update.mode)
        progress = self.busy_seconds, self.version
        is_lent = self.is_paused and self._will_resume
        return Activity(self._scheduler, self._calls.schedules, update, self.is_paused, progress, is_lent)

    def _is_updating(self) -> bool:
        """Whether new weights are to be installed before any further call starts."""
        return self._update is not None and (self._update.mode != "drain" or not self._scheduler.running)

    def _is_pausing(self) -> bool:
        """Whether no further call may start now."""
        return self._pause_mode is not None and not (self._pause_mode == "wait" and self._scheduler.running)

    async def _apply(self, update: WeightUpdate) -> None:
        if not await self._leader.install(update):
            return
        if update.mode == "keep":
            self._scheduler.keep_running()
        else:
            self._scheduler.recompute()
        self.version = update.version
        update.resolve()


def _check_request(
    tokens: np.ndarray, params: SamplingParams, config: ModelConfig, max_model_len: int, decode: Decode | None
) -> int:
    """Returns the most tokens that a request may sample after the context `tokens`.

    max_model_len: tokens that one conversation can hold. decode: text of token ids, if the sampler has it.

    Raises ValueError for an empty context, or one that leaves no room for a token, and UserError for token ids that the
    network does not have, stop strings without `decode`, or return_routing with a cache without routing.
    """
    if not len(tokens):
        raise ValueError("the context is empty; give the tokens that the sample follows")
    budget = min(params.max_tokens, max_model_len - len(tokens))
    if budget < 1:
        raise ValueError(f"{len(tokens)} tokens leave no room in a context of {max_model_len}")
    is_wrong = (tokens < 0) | (tokens >= config.vocab_size)
    if is_wrong.any():
        wrong = tokens[is_wrong][0]
        raise UserError(f"the context has the token id {wrong}; those of the model are 0 to {config.vocab_size - 1}.")
    if params.stop_strings and decode is None:
        raise UserError(f"stop_strings={params.stop_strings!r} needs a Sampler with decode=, the text of token ids.")
    if params.return_routing and not config.cache_routing:
        raise UserError("return_routing needs a cache with routing; set model.cache_routing=True in the config.")
    return budget
