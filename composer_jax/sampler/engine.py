"""Engine: one copy of the weights. One task schedules, starts, finishes and commits device calls; requests come and go.

The next calls start while one is outstanding (device_calls.py), so the devices compute while the host reads, commits,
streams and schedules.
"""

import asyncio
import dataclasses
import functools
from array import array
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from jax.sharding import Mesh

from composer_jax.errors import OtherProcessError, UserError
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import ModelDef
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.detokenizer import Decode
from composer_jax.sampler.device_calls import BusyTime, DeviceCalls
from composer_jax.sampler.drafts import Speculation
from composer_jax.sampler.policy import SamplingParams
from composer_jax.sampler.request import Request, RequestHandle
from composer_jax.sampler.request_table import RequestTable
from composer_jax.sampler.runner import RowScores, Runner
from composer_jax.sampler.scheduler import Scheduler
from composer_jax.sampler.sequence import CacheLease, Limits, SchedulerOutput
from composer_jax.sampler.session import EngineSession
from composer_jax.sampler.session_gate import Place, SessionGate
from composer_jax.sampler.several_processes import Leader, WeightUpdate
from composer_jax.sampler.start_schedule import StepOutput, start_schedule
from composer_jax.sampler.watchdog import Activity, Watchdog

PauseMode = Literal["keep", "wait", "abort"]


@dataclasses.dataclass(frozen=True)
class SamplerStats:
    """What an engine is doing, and has done, or the engines of a sampler together."""

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


class Engine:
    """One copy of the weights: the devices over which it is divided, with a scheduler, pages and prefix tree of its
    own.

    A Sampler (sampler/sampler.py) has one or more, and says which of them a session or a request comes to. An engine
    serves from `start` until `stop`.
    """

    def __init__(
        self,
        definition: ModelDef,
        mesh: Mesh,
        config: SamplerConfig,
        limits: Limits,
        *,
        name: str,
        busy: BusyTime,
        end_tokens: Sequence[int],
        decode: Decode | None,
        only_fitting: bool,
        on_failure: Callable[[Exception], object],
    ) -> None:
        """
        Args:
          definition: with weights as the engine stores them (rollout_model_def).
          mesh: of the engine's devices.
          config: of the sampler; its numbers are those of all engines together.
          limits: made from `config`, with the batch shards of this engine.
          name: in warnings.
          busy: of all engines.
          end_tokens, decode, only_fitting: as of Sampler.
          on_failure: called in the event loop with what ends a serving, before the requests get it.
        """
        self.definition, self.mesh, self.config = definition, mesh, config
        self.end_tokens, self.decode = tuple(end_tokens), decode
        self.version, self.is_serving = -1, False
        self.decoded_tokens, self.prefilled_tokens = 0, 0
        self.prefill_places = 0
        """Rows x tokens of the prefill calls: prefilled tokens and padding."""
        self.limits, self._on_failure = limits, on_failure
        self.runner = Runner(definition, mesh, config, limits, self.end_tokens)
        self._scheduler = Scheduler(self.limits)
        self._calls = DeviceCalls(self.limits.most_ahead, busy)
        self._requests = RequestTable(self._scheduler, self.runner, self._calls)
        self._new_gate = functools.partial(
            SessionGate,
            self.limits,
            lambda: bool(self._scheduler.running or self._scheduler.waiting),
            lambda: self._scheduler.n_held_pages,
            only_fitting=only_fitting,
        )
        self.gate = self._new_gate()
        self._update: WeightUpdate | None = None
        self._speculation = Speculation(config.drafts, config.draft_tokens) if config.drafts else None
        self._forgets_cache = False
        """Whether the cache is to be forgotten when no call is outstanding."""
        self._error: Exception | None = RuntimeError("this sampler does not serve")
        """What ended the serving; None while it goes on."""
        self._failure: Exception | None = None
        """What ended the serving of another engine of the sampler, and so this one's."""
        self._work, self._rests = asyncio.Event(), False
        """`_rests`: whether it waits for other engines, until new weights are installed in all."""
        self._watchdog = Watchdog(config.stall_seconds, self._activity, name=name)

    # -- weights -------------------------------------------------------------------------------------------------

    def note_weights(self, version: int, *, keeps_running: bool = False) -> None:
        """Notes that the runner has other weights; later tokens carry `version`. No device call is outstanding.

        keeps_running: running requests and open sessions go on with what the old weights computed; else their contexts
          are computed again.
        """
        if keeps_running:
            self._scheduler.keep_running()
        else:
            self._scheduler.recompute()
        self.version = version

    def begin_update(self, update: WeightUpdate) -> None:
        """Comes to rest for new weights as soon as `update.mode` lets it, and goes on when they are installed."""
        self._update = update
        self._work.set()

    def score(self, tokens: Sequence[int]) -> RowScores:
        """See Runner.score. An engine that serves must be paused."""
        assert self.is_paused or not self.is_serving, "device calls of a serving would mix with those of the row"
        return self.runner.score(tokens)

    def reset_prefix_cache(self) -> None:
        """See Sampler.reset_prefix_cache."""
        if self._error is None:
            self._forgets_cache = True
            self._work.set()
        else:
            self._scheduler.recompute()

    def begin_pause(self, mode: PauseMode, *, will_resume: bool) -> None:
        """Comes to rest as Sampler.pause says; `paused` waits for it."""
        self._pause_mode, self._will_resume = mode, will_resume
        self._paused.clear()
        self._work.set()
        if self._waits_for_engines and self._is_pausing():
            self._note_pause()  # they may pause before they rest

    async def paused(self) -> None:
        """Returns when the engine has come to rest, or has been resumed. Raises what ended the serving."""
        await self._paused.wait()
        self._raise_if_ended()

    def resume(self) -> None:
        """See Sampler.resume."""
        self._pause_mode = None
        self._paused.set()
        self._work.set()

    @property
    def is_paused(self) -> bool:
        """Whether `pause` was called and `resume` not yet."""
        return self.is_serving and self._pause_mode is not None

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

    def start(self, leader: Leader) -> None:
        """Begins to serve, with weights of a version."""
        self._leader, self._error, self._failure = leader, None, None
        self._leaving, self._rests, self._update, self._work = False, False, None, asyncio.Event()
        self._pause_mode: PauseMode | None = None
        self._will_resume, self._paused = False, asyncio.Event()
        self.gate = self._new_gate()
        self.is_serving = True
        self._server = asyncio.create_task(self._serve())

    async def stop(self) -> None:
        """Ends the serving when the outstanding device calls have ended; raises what ended it before."""
        # Cancelling would leave a device call running in its thread, next to those of the next serving.
        self._leaving = True
        self._work.set()
        try:
            await self._server
        finally:
            self.is_serving = False

    def fail(self, error: Exception) -> None:
        """Ends the serving with an error of another engine, as if a device call had raised it."""
        self._failure = error
        self._work.set()

    def wake(self) -> None:
        """Makes the serving look whether another process has failed."""
        self._work.set()

    @property
    def slots(self) -> int:
        """Requests that run at once."""
        return self.limits.rows * self.limits.shards

    @property
    def load(self) -> int:
        """Open sessions, or requests if these are more."""
        return max(self.gate.n_open, len(self._scheduler.running) + len(self._scheduler.waiting))

    def n_cached(self, tokens: "array[int]") -> int:
        """Returns how many tokens of a context are in the cache."""
        return self._scheduler.n_cached(tokens)

    def open(self, seed: int, place: Place) -> EngineSession:
        """Returns a session that has got a place of the gate."""
        return EngineSession(self.submit, self.config.max_model_len, seed, self.gate, place, self._close)

    def submit(self, request: Request) -> RequestHandle:
        """See Sampler.submit."""
        self._raise_if_ended()
        return self.queue(*self.check(request))

    def check(self, request: Request) -> "tuple[Request, int]":
        """Returns a request with an array of tokens, and the most tokens to sample. Raises what Sampler.submit says."""
        tokens, config = np.asarray(request.tokens), self.definition.config
        budget = _check_request(tokens, request.params, config, self.config.max_model_len, self.decode)
        return dataclasses.replace(request, tokens=array("i", tokens.astype(np.int32).tobytes())), budget

    def queue(self, request: Request, budget: int) -> RequestHandle:
        """Queues what `check` has returned."""
        future = asyncio.get_running_loop().create_future()
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
            reason = error if error is self._failure else self._leader.fail(error)
            self._on_failure(reason)
            self._scheduler.recompute()
            if not isinstance(reason, OtherProcessError):  # which may never run a program again
                await asyncio.to_thread(self.runner.wait)
                self.runner.reset_cache()
            if reason is not error:
                raise reason from error
            raise
        finally:
            self._watchdog.stop()
            self._calls.forget()
            self._error = reason
            self.gate.end(reason)
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
        if self._failure is not None:
            raise self._failure
        self._requests.free_done()
        if self._calls and (self._forgets_cache or self._is_updating() or self._is_pausing()):
            await self._finish_oldest()
            return  # what is wanted may have changed meanwhile
        self._forget_cache()
        if self._update is not None and self._is_updating():
            self._rests, update = True, self._update
            await update.rest()
            self._rests = False
            if self._update is update:  # else the next one came before this engine went on
                self._update = None
        elif self._is_pausing():
            self._note_pause()
            await self._work.wait()
        elif not self._calls.is_full and (schedule := self._schedule()):
            await self._start(schedule)
        elif self._calls:
            await self._finish_oldest()
        else:
            await self._work.wait()

    def _note_pause(self) -> None:
        """Lets `pause` return."""
        if self._pause_mode == "abort":
            self._requests.end_all()
            self._pause_mode = "keep"  # requests that come during the pause wait for its end
        self._paused.set()

    def _schedule(self) -> SchedulerOutput:
        return self._scheduler.schedule(admit=self._update is None and self._pause_mode is None)

    async def _start(self, schedule: SchedulerOutput) -> None:
        handles = self._requests.handles(schedule.decode)
        arguments = self.runner, self._speculation, schedule, handles, self.version
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
        progress = self._calls.progress, self.version
        waits_for_others = self._waits_for_engines or (self.is_paused and self._will_resume)
        return Activity(self._scheduler, self._calls.schedules, update, self.is_paused, progress, waits_for_others)

    @property
    def _waits_for_engines(self) -> bool:
        """Whether it rests for an update, and other engines do not yet."""
        return self._rests and self._update is not None and self._update.n_busy > 0

    def _is_updating(self) -> bool:
        """Whether new weights are to be installed before any further call starts."""
        return self._update is not None and (self._update.mode != "drain" or not self._scheduler.running)

    def _is_pausing(self) -> bool:
        """Whether no further call may start now."""
        return self._pause_mode is not None and not (self._pause_mode == "wait" and self._scheduler.running)


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
