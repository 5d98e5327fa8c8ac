"""Sampler: one engine, or the router over several, each of which has one copy of the weights.

With `replica` > 1 in the sampler's mesh, the devices of each replica are an engine, with a scheduler, pages, a prefix
tree and a serving loop of its own. Nothing travels between engines, and none waits for another one's device calls. A
session opens on the engine with the least to do and stays there, where its prefix is (session_queue.py). A request
without a session goes to the engine that has most of its context, unless that one has far more to do than another.

What is sampled does not depend on the engine: all have the same weights, and a draw is a function of the request's seed
and of positions (token_sampling.py).
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import numpy as np
from jax.sharding import Mesh

from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef, Params
from composer_jax.observe.progress import Progress
from composer_jax.parallel.mesh import batch_shards
from composer_jax.parallel.processes import is_first_process
from composer_jax.sampler.config import SamplerConfig, make_limits
from composer_jax.sampler.detokenizer import Decode
from composer_jax.sampler.device_calls import BusyTime
from composer_jax.sampler.engine import Engine, PauseMode, SamplerStats
from composer_jax.sampler.engine_weights import EngineWeights, engine_meshes
from composer_jax.sampler.request import Request, RequestHandle
from composer_jax.sampler.rollout_weights import rollout_model_def
from composer_jax.sampler.runner import RowScores
from composer_jax.sampler.sequence import token_array
from composer_jax.sampler.session import EngineSession
from composer_jax.sampler.session_queue import SessionQueue
from composer_jax.sampler.several_processes import (
    Leader,
    OnAsk,
    OnCall,
    UpdateMode,
    WeightsOfVersion,
    WeightUpdate,
    follow,
)
from composer_jax.sampler.weight_checksums import WeightChecksums


class Sampler:
    """A TrainablePolicy (sampler/policy.py) on the devices of a mesh: continuous batching over paged prefix caches.

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
          config: its slots and cache_tokens are those of all engines together.
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
        self.limits = make_limits(config, batch_shards(mesh), definition.config)
        """Of all engines together."""
        meshes = engine_meshes(mesh)
        limits = dataclasses.replace(self.limits, shards=self.limits.shards // len(meshes))
        self._busy = BusyTime()
        options = {"end_tokens": end_tokens, "decode": decode, "only_fitting": only_fitting}
        options |= {"busy": self._busy, "on_failure": self._fail}
        names = _names_of_engines(len(meshes))
        self.engines = [
            Engine(definition, one, config, limits, name=name, **options)
            for one, name in zip(meshes, names, strict=True)
        ]
        self._runners = [engine.runner for engine in self.engines]
        self._weights = EngineWeights(definition, mesh, self._runners)
        self.learner_checksums = self._weights.learner_checksums
        self.is_serving = False
        self._error: Exception | None = RuntimeError("this sampler does not serve")
        self._most_sessions = most_sessions
        self._sessions: SessionQueue[Engine] = self._new_queue()
        self._updated: asyncio.Event | None = None
        """Set when the last update of the serving is over. Its weights are not kept."""

    # -- weights -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """That of the weights; -1: none."""
        return self._weights.version

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
            If only some engines refuse them, no weights are left (EngineWeights.install).
        """
        if self.is_serving:
            raise RuntimeError("this sampler is serving; use update_serving inside the block")
        self._weights.install(params, router_bias, version, copy=copy, checksums=checksums)
        for engine in self.engines:
            engine.note_weights(version)

    def release(self) -> None:
        """Frees the memory of weights and cache until the next `update`. Call it while the sampler is not serving."""
        assert not self.is_serving, "requests need the weights"
        self._weights.release()

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
          mode: "recompute": running requests go on with contexts that the new weights compute again. "keep": they go on
            with what the old weights computed, as do sessions that are open (PipelineRL, arXiv 2509.19128). "drain":
            running requests end with the old weights first, while others wait.
          params, router_bias: arrays, or HostTensors (host_weights.py), which replace the old weights one by one: a
            device then needs no memory beside them, and an error in the middle ends the serving.
          copy, checksums: as for `update`; HostTensors need checksums.

        Raises:
          RuntimeError: the sampler does not serve, or another update waits for running requests to end.
          ValueError, UserError: as from `update`. The serving goes on; over several processes, and where no weights are
            left, it ends.
        """
        is_updating = self._updated is not None and not self._updated.is_set()
        if not self.is_serving or is_updating:
            reason = "another update is waiting" if self.is_serving else "this sampler is not serving; call update"
            raise RuntimeError(reason)
        self._raise_if_ended()
        done = asyncio.get_running_loop().create_future()
        n = len(self.engines)
        update = WeightUpdate(params, router_bias, version, mode, copy, checksums, n, self._apply, done)
        self._updated = update.over
        for engine in self.engines:
            engine.begin_update(update)
        await done

    async def _apply(self, update: WeightUpdate) -> None:
        """Installs weights while all engines rest."""
        if await self._leader.install(update):
            for engine in self.engines:
                engine.note_weights(update.version, keeps_running=update.mode == "keep")
            update.resolve()

    @property
    def checksums(self) -> WeightChecksums:
        """Those of the weights that the sampler holds; none before the first update."""
        return self._weights.checksums

    def score(self, tokens: Sequence[int]) -> RowScores:
        """See Runner.score; the shards are those of all engines.

        A sampler that serves must be paused; one over several processes must serve.
        """
        with ThreadPoolExecutor(len(self.engines)) as pool:
            scores = list(pool.map(lambda engine: engine.score(tokens), self.engines))
        return RowScores(np.concatenate([one.logprobs_BS for one in scores]), scores[0].routing)

    def reset_prefix_cache(self) -> None:
        """Forgets all that is cached; running requests compute their contexts again. For measurements.

        While the sampler serves, this happens before any further device call.
        """
        for engine in self.engines:
            engine.reset_prefix_cache()

    def warm_up(self, *, processed: bool = False) -> int:
        """Compiles all programs, so that nothing compiles later, and shows the progress; returns their number.

        A program belongs to the devices that it is compiled for, so each engine compiles its own: their number grows
        with the engines of this process, which compile in threads beside each other. Call `update` before; no session
        may be open.

        processed: whether requests with a temperature, top_k, top_p or min_p will come. Without it, their programs
          compile when the first of them is decoded.
        """
        by_engine = [runner.warm_up_calls(processed) for runner in self._runners if runner.is_here]
        total = sum(map(len, by_engine))
        with Progress(total, "program", "compile the sampler") as progress, ThreadPoolExecutor(len(by_engine)) as pool:
            together = map if self.mesh.is_multi_process else pool.map  # processes need one order of what they share
            for calls in zip(*by_engine, strict=True):
                progress.update(sum(1 for _ in together(lambda call: call(), calls)))
        return total

    # -- what it is doing ----------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "keep", *, will_resume: bool = False) -> None:
        """Stops device calls until `resume`; returns when the last one has ended.

        Requests can be submitted meanwhile, and weights updated (not with mode="drain" while requests run).

        Args:
          mode: "keep": running requests wait, and go on after `resume`. "wait": they end first, while others wait.
            "abort": every request ends at once, with what it has sampled and the finish reason "cancelled".
          will_resume: the caller resumes by itself, so requests that wait meanwhile are not logged as a stall.
        """
        self._raise_if_ended()
        for engine in self.engines:
            engine.begin_pause(mode, will_resume=will_resume)
        await asyncio.gather(*(engine.paused() for engine in self.engines))

    def resume(self) -> None:
        """Goes on after `pause`, also one that still waits; does nothing if the sampler is not paused."""
        for engine in self.engines:
            engine.resume()

    @property
    def is_paused(self) -> bool:
        """Whether `pause` was called and `resume` not yet."""
        return all(engine.is_paused for engine in self.engines)

    @property
    def error(self) -> Exception | None:
        """What ended the serving; None while it goes on."""
        return self._error if self.is_serving else RuntimeError("this sampler does not serve")

    @property
    def busy_seconds(self) -> float:
        """Seconds with an outstanding device call of any engine, up to the last that started or finished."""
        return self._busy.seconds

    @property
    def decoded_tokens(self) -> int:
        """Tokens that requests got so far."""
        return sum(engine.decoded_tokens for engine in self.engines)

    @property
    def prefilled_tokens(self) -> int:
        """Tokens that prefill calls have computed so far."""
        return sum(engine.prefilled_tokens for engine in self.engines)

    @property
    def prefill_places(self) -> int:
        """Rows x tokens of the prefill calls: prefilled tokens and padding."""
        return sum(engine.prefill_places for engine in self.engines)

    @property
    def stats(self) -> SamplerStats:
        """Numbers of requests and pages at this moment, of all engines together."""
        stats = [engine.stats for engine in self.engines]

        def total(field: str) -> Any:
            values = [getattr(one, field) for one in stats]
            return tuple(map(sum, zip(*values, strict=True))) if isinstance(values[0], tuple) else sum(values)

        return SamplerStats(**{field.name: total(field.name) for field in dataclasses.fields(SamplerStats)})

    # -- sessions ------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Self]:
        """Serves sessions inside the block.

        If an engine fails, every pending request of all engines raises what ended its engine, and every later one the
        first of these exceptions.
        Raises RuntimeError if no weights were installed by `update`, the sampler is serving already, or process 0
        serves. The serving ends with an OtherProcessError if another process of the mesh failed or is gone.
        """
        if self.version < 0:
            raise RuntimeError("call Sampler.update before serving")
        if self.is_serving:
            raise RuntimeError("this sampler is serving already; open sessions inside the block that is running")
        if self.mesh.is_multi_process and not is_first_process():
            raise RuntimeError("process 0 serves; the other processes call Sampler.follow")
        self.is_serving, self._updated = True, None
        try:
            async with Leader(self._runners, self._weights, self._wake) as self._leader:
                for engine in self.engines:
                    engine.start(self._leader)
                self._sessions, self._error = self._new_queue(), None
                try:
                    yield self
                finally:
                    await self._stop()
        finally:
            self.is_serving = False

    async def _stop(self) -> None:
        """Ends the serving of all engines at the same time; raises what ended one of them before."""
        self._end(RuntimeError("this sampler has stopped serving"))  # an update that came now would find no engine
        ends = await asyncio.gather(*(engine.stop() for engine in self.engines), return_exceptions=True)
        if errors := [end for end in ends if end is not None]:
            raise errors[0]

    def _fail(self, error: Exception) -> None:
        """Ends the serving of every engine with what ended one of them."""
        self._end(error)
        for engine in self.engines:
            engine.fail(error)

    def _end(self, reason: Exception) -> None:
        if self._error is None:
            self._error = reason
            self._sessions.end(reason)

    def _wake(self) -> None:
        for engine in self.engines:
            engine.wake()

    def _new_queue(self) -> SessionQueue[Engine]:
        return SessionQueue(self.engines, self._raise_if_ended, most_sessions=self._most_sessions)

    def _raise_if_ended(self) -> None:
        if self._error is not None:
            raise self._error

    async def open(self, seed: int, *, ahead: bool = False) -> EngineSession:
        """See TrainablePolicy.open. The memory of the caches bounds the open sessions (session_gate.py)."""
        engine, place = await self._sessions.open(ahead=ahead)
        return engine.open(seed, place)

    def submit(self, request: Request) -> RequestHandle:
        """Queues a request; the handle gives its Sample, or what it samples as it does.

        It goes to the engine with most of its context in the cache. One with more to do than it has slots, and more
        than twice as much as another engine, does not count.

        Raises ValueError for an empty context, or one that leaves no room for a token, and UserError for token ids that
        the network does not have, or stop strings without a decoder.
        """
        self._raise_if_ended()
        request, budget = self.engines[0].check(request)
        most = 2 * min(engine.load for engine in self.engines)
        candidates = [engine for engine in self.engines if engine.load <= max(most, engine.slots)]
        if len(candidates) > 1:
            tokens = token_array(request.tokens)
            candidates = [max(candidates, key=lambda engine: (engine.n_cached(tokens), -engine.load))]
        return candidates[0].queue(request, budget)

    # -- several processes ---------------------------------------------------------------------------------------

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
            follow(self._runners, self._weights, weights, on_call, on_ask)
        finally:
            self.is_serving = False


def _names_of_engines(n: int) -> list[str]:
    """Returns what begins a sentence about each of n engines."""
    return ["The sampler"] if n == 1 else [f"Engine {number} of {n} of the sampler" for number in range(1, n + 1)]
