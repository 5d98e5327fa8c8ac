"""The host side of sampling: sessions, continuous batching, weight versions.

Sessions submit requests concurrently (asyncio). One serving task batches the pending requests into calls of jitted
prefill and decode programs, which have a few fixed shapes: nothing recompiles when conversations grow, branch or end.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef, Params
from composer_jax.parallel.mesh import batch_shards
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.decode import DecodedTokens, init_slots
from composer_jax.sampler.detokenizer import Decode
from composer_jax.sampler.programs import decode_program, decode_rows_program, prefill_program, slot_specs
from composer_jax.sampler.request import Request
from composer_jax.sampler.session import SlotSession


class Sampler:
    """A Policy (sampler/policy.py) on this process's devices, with continuous batching over slots.

    Open and use sessions inside `async with sampler.serving():`.
    """

    def __init__(
        self,
        definition: ModelDef,
        mesh: Mesh,
        config: SamplerConfig,
        *,
        end_tokens: Sequence[int],
        decode: Decode | None = None,
    ):
        """
        Args:
          mesh: the run's mesh; with config.mesh the sampler makes its own over the same devices.
          end_tokens: ids that end a message, such as ChatFormat.end_tokens.
          decode: text of token ids, which requests with stop strings need.

        Raises:
          UserError: sizes of `config` that do not fit the mesh or the model.
        """
        if config.mesh is not None:
            mesh = config.mesh.make_mesh(list(mesh.devices.flat))
        if config.param_dtype:
            definition = ModelDef(dataclasses.replace(definition.config, param_dtype=config.param_dtype))
        shards = batch_shards(mesh)
        if config.slots % shards:
            raise UserError(
                f"{config.slots} sampler slots do not divide over {shards} devices; use a multiple of {shards}."
            )
        if config.capacity > definition.config.max_context:
            raise UserError(
                f"A sampler capacity of {config.capacity} tokens exceeds the model's max_context="
                f"{definition.config.max_context}."
            )
        self.definition, self.mesh, self.config = definition, mesh, config
        self.end_tokens, self.decode = tuple(end_tokens), decode
        self.windows = (*sorted(w for w in config.windows if w < config.capacity), config.capacity)
        self.shards, self.per_shard = shards, config.slots // shards
        self.decode_rows = (*sorted(r for r in config.decode_rows if r < self.per_shard), self.per_shard)
        self.version = -1
        self.decoded_tokens = self.prefilled_tokens = 0
        self.busy_seconds = 0.0
        self._compile()
        self._free: list[int] = []
        self._waiting: list[Request] = []
        self._running: dict[int, Request] = {}
        self.is_serving = False

    # -- weights -------------------------------------------------------------------------------------------------

    def update(self, params: Params, router_bias: Params, version: int, *, copy: bool = True) -> None:
        """Installs the weights in this sampler's layout and dtypes; later tokens carry `version`.

        copy: False shares the arrays that have this layout and dtype already; the caller then never donates them.
        """
        weights = (params, router_bias)
        same_dtypes = all(
            a.dtype == to.dtype
            for a, to in zip(jax.tree.leaves(weights), jax.tree.leaves(self.definition.shapes()), strict=True)
        )
        if copy or not same_dtypes:
            weights = self._copy(weights)
        self._weights = jax.device_put(weights, self.definition.shardings(self.mesh))
        self.version = version

    @property
    def num_programs(self) -> int:
        """Number of programs that `warm_up` compiles: one per window and shape of a call."""
        return len(self.windows) * (len(self.config.prefill_shapes) + len(self.decode_rows))

    def warm_up(self, on_done: Callable[[], None] = lambda: None) -> None:
        """Compiles all programs by calls that consist of padding, so that nothing compiles later.

        Call `update` before; no session may be open. `on_done` is called after each of the `num_programs` programs.
        Decode programs with temperature, top_k and top_p compile when the first such request is decoded.
        """
        for window in self.windows:
            for rows, length in self.config.prefill_shapes:
                n = self.shards * rows
                padding = [np.zeros(shape, np.int32) for shape in (n, (n, length), n, n)]
                seeds = np.zeros(n, np.uint32)
                self._slots = self._prefill[window](*self._weights, self._slots, *padding, seeds)
                on_done()
            for rows in self.decode_rows:
                padding = np.zeros(self.shards * rows, np.int32)
                self._decode(window, rows, padding, padding, ())
                on_done()

    # -- sessions ------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["Sampler"]:
        """Serves sessions inside the block.

        If serving fails, every pending request raises the exception, and so does every later one.

        Raises:
          RuntimeError: no weights were installed by `update`, or the sampler is serving already.
        """
        if self.version < 0:
            raise RuntimeError("call Sampler.update before serving")
        if self.is_serving:
            raise RuntimeError("this sampler is serving already; open sessions inside the block that is running")
        self._waiting, self._running, self._error, self._leaving = [], {}, None, False
        self._free = [local * self.shards + shard for shard in range(self.shards) for local in range(self.per_shard)]
        self._free.sort(reverse=True)
        self._slot_freed, self._work = asyncio.Event(), asyncio.Event()
        self.is_serving, server = True, asyncio.create_task(self._serve())
        try:
            yield self
        finally:
            # Cancelling would leave a device call running in its thread, next to those of the next serving.
            self._leaving = True
            self._work.set()
            try:
                await server
            finally:
                self.is_serving = False

    async def open(self, seed: int) -> SlotSession:
        """Returns a session with an empty context, after waiting for a free slot.

        Args:
          seed: uint32; fixes all random choices of the session.
        """
        while not self._free:
            self._raise_if_ended()
            self._slot_freed.clear()
            await self._slot_freed.wait()
        return SlotSession(self, self._free.pop(), seed)

    def submit(self, request: Request) -> None:
        """Queues a request of a session; its future gets the Sample."""
        self._raise_if_ended()
        self._waiting.append(request)
        self._work.set()

    def release(self, slot: int) -> None:
        """Frees the slot of a closed session."""
        self._free.append(slot)
        self._slot_freed.set()

    def _raise_if_ended(self) -> None:
        if self._error is not None:
            raise self._error

    async def _serve(self) -> None:
        reason: Exception = RuntimeError("this sampler has stopped serving")
        try:
            while not self._leaving:
                if not self._waiting and not self._running:
                    self._work.clear()
                    await self._work.wait()
                started = time.perf_counter()
                while waiting := self._drop_cancelled():
                    await asyncio.to_thread(self._prefill_once, waiting)
                if self._running:
                    await asyncio.to_thread(self._decode_once)
                    self._finish()
                self.busy_seconds += time.perf_counter() - started
                await asyncio.sleep(0)
        except Exception as error:
            reason = error
            raise
        finally:
            self._error = reason
            self._slot_freed.set()
            for request in [*self._waiting, *self._running.values()]:
                if not request.future.done():
                    request.future.set_exception(reason)

    def _drop_cancelled(self) -> list[Request]:
        """Drops waiting requests of cancelled sessions (their slots may be in use again); returns the others."""
        self._waiting = [r for r in self._waiting if not r.future.cancelled()]
        return list(self._waiting)

    # -- device calls --------------------------------------------------------------------------------------------

    def _prefill_once(self, waiting: list[Request]) -> None:
        """Makes one prefill call, with the next piece of as many waiting requests as fit. Runs in a thread."""
        rows, length = self._shape_for(waiting[0])
        # Requests that need this very shape come first; shorter ones fill the remaining rows.
        fitting = [r for r in waiting if self._shape_for(r) == (rows, length)]
        fitting += [r for r in waiting if len(r.pending) <= length and r not in fitting]
        by_shard: list[list[Request]] = [[] for _ in range(self.shards)]
        for request in fitting:
            shard = by_shard[request.slot % self.shards]
            if len(shard) < rows:
                shard.append(request)
        index = np.zeros((self.shards, rows), np.int32)
        tokens = np.zeros((self.shards, rows, length), np.int32)
        count, start = np.zeros((self.shards, rows), np.int32), np.zeros((self.shards, rows), np.int32)
        seed = np.zeros((self.shards, rows), np.uint32)
        for shard, requests in enumerate(by_shard):
            for row, request in enumerate(requests):
                piece, request.pending = request.pending[:length], request.pending[length:]
                index[shard, row], count[shard, row] = request.slot // self.shards, len(piece)
                start[shard, row], seed[shard, row] = request.start, request.seed
                tokens[shard, row, : len(piece)] = piece
                request.start += len(piece)
                self.prefilled_tokens += len(piece)
        flat = lambda a: a.reshape(self.shards * rows, *a.shape[2:])  # noqa: E731
        window = _smallest_fitting(self.windows, int((start + count).max()))
        self._slots = self._prefill[window](
            *self._weights, self._slots, *map(flat, (index, tokens, count, start, seed))
        )
        for request in waiting:
            if not len(request.pending):
                self._waiting.remove(request)
                self._running[request.slot] = request

    def _shape_for(self, request: Request) -> tuple[int, int]:
        shapes = self.config.prefill_shapes
        return next((shape for shape in shapes if len(request.pending) <= shape[1]), shapes[-1])

    def _decode_once(self) -> None:
        """Makes one decode call for all running requests. Runs in a thread."""
        by_shard: list[list[Request]] = [[] for _ in range(self.shards)]
        for request in self._running.values():
            by_shard[request.slot % self.shards].append(request)
        rows = _smallest_fitting(self.decode_rows, max(map(len, by_shard)))
        index, budget, top_k = np.zeros((3, self.shards, rows), np.int32)
        temperature, top_p = np.ones((2, self.shards, rows), np.float32)
        if rows == self.per_shard:  # all slots, each in its own row
            placed = [[(request.slot // self.shards, request) for request in requests] for requests in by_shard]
        else:
            placed = [list(enumerate(requests)) for requests in by_shard]
        for shard, requests in enumerate(placed):
            for row, request in requests:
                index[shard, row], budget[shard, row] = request.slot // self.shards, request.budget
                wanted = request.params
                temperature[shard, row], top_p[shard, row] = wanted.temperature, wanted.top_p
                top_k[shard, row] = wanted.top_k
        plain = all(request.params.unprocessed for request in self._running.values())
        params = () if plain else (temperature.reshape(-1), top_p.reshape(-1), top_k.reshape(-1))
        steps = self.config.decode_steps
        longest = max(r.start + len(r.tokens) + min(steps, r.budget) for r in self._running.values())
        window = _smallest_fitting(self.windows, longest)
        out = self._decode(window, rows, index.reshape(-1), budget.reshape(-1), params)
        tokens, logprobs, emitted = (np.asarray(a).reshape(-1, self.shards, rows) for a in out)
        for shard, requests in enumerate(placed):
            for row, request in requests:
                n = int(emitted[:, shard, row].sum())
                request.extend(tokens[:n, shard, row].tolist(), logprobs[:n, shard, row].tolist(), self.version)
                self.decoded_tokens += n

    def _decode(
        self, window: int, rows: int, index: np.ndarray, budget: np.ndarray, params: tuple[np.ndarray, ...]
    ) -> DecodedTokens:
        """Decodes the slots `index`. With as many rows as slots, row i is slot i, and the cache is not copied.

        params: the arrays of RowParams, or none where every row samples from the network's own distribution, which has
          programs without them.
        """
        if rows == self.per_shard:
            self._slots, out = self._decode_all[window, bool(params)](*self._weights, self._slots, budget, *params)
        else:
            self._slots, out = self._decode_rows[window, bool(params)](
                *self._weights, self._slots, index, budget, *params
            )
        return out

    def _finish(self) -> None:
        """Resolves the running requests that are complete, and forgets cancelled ones."""
        for slot, request in list(self._running.items()):
            if request.settle(self.end_tokens):
                del self._running[slot]

    def _compile(self) -> None:
        definition, config = self.definition, self.config
        slots_spec = slot_specs(definition)
        self._prefill, self._decode_all, self._decode_rows = {}, {}, {}
        for window in self.windows:
            self._prefill[window] = prefill_program(definition, self.mesh, window)
            for processed in (False, True):
                arguments = (definition, self.mesh, window, config.decode_steps, self.end_tokens, processed)
                self._decode_all[window, processed] = decode_program(*arguments)
                self._decode_rows[window, processed] = decode_rows_program(*arguments)
        self._copy = jax.jit(
            lambda weights: jax.tree.map(lambda a, to: jnp.copy(a).astype(to.dtype), weights, definition.shapes())
        )
        self._slots = jax.jit(
            jax.shard_map(
                lambda: init_slots(definition.config, self.per_shard, config.capacity),
                mesh=self.mesh,
                in_specs=(),
                out_specs=slots_spec,
                check_vma=False,
            )
        )()


def _smallest_fitting(sizes: tuple[int, ...], needed: int) -> int:
    """The first of the ascending `sizes` that is at least `needed`, or the last."""
    return next((size for size in sizes if size >= needed), sizes[-1])
