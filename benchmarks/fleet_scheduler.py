"""Host time of engines whose devices are scripted: a part of benchmarks.fleet.

Sampler, session gate, scheduler, prefix trees, page tables, the arguments of every call and the read of its results are
the real ones. Only the programs are scripted: a decode call emits what each row's budget allows, and a route read
returns zeros of its size. Seconds are CPU seconds of the process, so another busy process does not change them much.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.models.model_def import ModelDef
from composer_jax.models.presets import PRESETS
from composer_jax.parallel.mesh import make_mesh
from composer_jax.parallel.platform import configure_cpu
from composer_jax.sampler import engine
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.decode import DecodedTokens, DecodeRows
from composer_jax.sampler.route_read import RouteReader, Wanted, route_dtype
from composer_jax.sampler.runner import Runner
from composer_jax.sampler.sampler import Sampler
from composer_jax.sampler.scheduler import Scheduler
from composer_jax.sampler.sequence import Limits, SequenceState, token_array

SHARDS = 16
VOCABULARY = 160_000
PREFILL_SHAPES = ((4, 128), (1, 1024))
"""Those of configs/kimi_k2_5.py:32k."""


@dataclasses.dataclass(frozen=True)
class EngineLoad:
    """What the engines do."""

    engines: int = 8
    slots: int = 128
    """Requests that run at once in an engine."""
    sessions: int = 160
    """Open ones of an engine: those beyond the slots wait, so a slot that is free is taken at once."""
    max_model_len: int = 32_768
    prompt: int = 2048
    """Tokens of a new session's first context; GROUP sessions have the same ones."""
    message: tuple[int, int] = (100, 600)
    """Tokens of a message, from and to."""
    observation: tuple[int, int] = (100, 600)
    """Tokens of the answer to it."""
    rounds: int = 200
    """Schedules of each engine that are measured: a prefill call and a decode call, or one of them."""


GROUP = 8
"""Sessions with the same prompt."""


class ScriptedRunner(Runner):
    """A Runner without weights and cache.

    Attributes:
      scripted_s: CPU seconds of the script itself.
      routes_s: CPU seconds in which route bytes were put together.
      calls: device calls so far by the names of their programs.
    """

    def install(self, params: Any, router_bias: Any, version: int, **options: Any) -> None:
        """Installs nothing."""
        self.installed = version, ()
        self._left = np.zeros((self.limits.shards, self.limits.rows), np.int32)
        self._rng, self.calls = np.random.default_rng(0), Counter[str]()
        self.scripted_s = self.routes_s = 0.0

    def wait(self) -> None:
        """Returns at once: no call runs."""

    def start_program(self, name: str, *inputs: Any, width: int | None = None) -> Any:
        """Returns what a device would have computed."""
        started = time.thread_time()
        self.calls[name] += 1
        if name.startswith("decode"):
            out = self._decode(DecodeRows(*inputs[:5]), inputs[5])
        elif name == "routing":
            assert self._routes is not None, "the network has experts"
            out = self._route_pieces(self._routes, inputs[0])
        else:
            out = ()
        self.scripted_s += time.thread_time() - started
        return out

    def start_routing(self, wanted: Sequence[Wanted]) -> Callable[[], list[np.ndarray]]:
        """See Runner.start_routing."""
        read = super().start_routing(wanted)

        def timed() -> list[np.ndarray]:
            started = time.thread_time()
            routes = read()
            self.routes_s += time.thread_time() - started
            return routes

        return timed

    def _decode(self, rows: DecodeRows[np.ndarray], source: np.ndarray) -> DecodedTokens:
        shards, steps = self.limits.shards, self.limits.decode_steps
        per_shard = len(source) // shards
        carried = self._left[np.arange(len(source)) // per_shard, source]
        budget = np.where(source >= 0, carried, rows.budget_B)
        left = np.maximum(budget - steps, 0)
        self._left = np.zeros_like(self._left)
        self._left[:, :per_shard] = left.reshape(shards, per_shard)
        tokens = self._rng.integers(0, VOCABULARY, (steps, len(source)), np.int32)
        logprobs = np.full(tokens.shape, -0.5, np.float32)
        none = np.zeros((*tokens.shape, 0), np.int32)
        emitted = np.arange(steps)[:, None] < budget
        return DecodedTokens(tokens, logprobs, logprobs, none, none, emitted)  # type: ignore[arg-type]

    def _route_pieces(self, routes: RouteReader, spans: np.ndarray) -> list[np.ndarray]:
        config = self.definition.config
        width = config.n_moe_layers * config.experts_per_token
        size, counts = routes._measure(spans)
        if not hasattr(self, "_piece"):
            self._piece = np.zeros((1, routes.sizes[-1], width), route_dtype(config.n_experts))
        return [self._piece[:, : size >> (number + 1) or 1] for _, number in routes._sent(size, counts)]


class _Load:
    """Engines, and sessions that keep them busy."""

    def __init__(self, load: EngineLoad) -> None:
        self.load, self.messages, self.load_s = load, 0, 0.0
        network = dataclasses.replace(PRESETS["kimi_k2_5"], cache_routing=True)
        config = SamplerConfig(load.slots, load.max_model_len, prefill_shapes=PREFILL_SHAPES, stall_seconds=0)
        mesh = make_mesh(jax.devices()[:SHARDS], data=SHARDS)
        engine.Runner = ScriptedRunner  # type: ignore[misc]
        self.samplers = [Sampler(ModelDef(network), mesh, config, end_tokens=()) for _ in range(load.engines)]
        for sampler in self.samplers:
            sampler.update({}, {}, 0)
        self._begun = 0
        self.all_begun = asyncio.Event()

    async def session(self, sampler: Sampler, number: int) -> None:
        """Sessions one after another, the first of which has some of its length already."""
        load, rng = self.load, np.random.default_rng(number)
        longest = load.max_model_len - load.message[1]
        length = int(rng.integers(load.prompt, longest))
        while True:
            started = time.thread_time()
            group = np.random.default_rng([number // GROUP, self.messages]).integers(0, VOCABULARY, load.prompt)
            context = token_array([*group.tolist(), *rng.integers(0, VOCABULARY, length - load.prompt).tolist()])
            self.load_s += time.thread_time() - started
            session, known = await sampler.open(number), 0
            while len(context) <= longest:
                params = SamplingParams(int(rng.integers(*load.message)), return_routing=True, routing_start=known)
                sample = await session.sample(context, params)
                started = time.thread_time()
                self._note()
                known = len(context) + len(sample.tokens) - 1
                context.extend(sample.tokens)
                context.extend(rng.integers(0, VOCABULARY, rng.integers(*load.observation)).tolist())
                self.load_s += time.thread_time() - started
            session.close()
            length = load.prompt

    def _note(self) -> None:
        self.messages += 1
        if self.messages == self.load.engines * self.load.sessions:
            self.all_begun.set()

    def counts(self) -> Counter[str]:
        """Device calls of all engines so far, and what else grows."""
        total: Counter[str] = Counter(messages=self.messages)
        for sampler in self.samplers:
            total.update(sampler.engines[0].runner.calls)  # type: ignore[attr-defined]
            total["prefilled"] += sampler.prefilled_tokens
        return total

    def scripted_s(self) -> tuple[float, float]:
        """CPU seconds of the scripts and of what sessions ask for so far, and those of the copies of routes."""
        runners: list[Any] = [sampler.engines[0].runner for sampler in self.samplers]
        return self.load_s + sum(runner.scripted_s for runner in runners), sum(runner.routes_s for runner in runners)


async def _measure(load: EngineLoad) -> dict[str, Any]:
    engines = _Load(load)
    async with contextlib.AsyncExitStack() as stack:
        for sampler in engines.samplers:
            await stack.enter_async_context(sampler.serving())
        numbers = range(load.engines * load.sessions)
        sessions = [asyncio.create_task(engines.session(engines.samplers[i % load.engines], i)) for i in numbers]
        try:
            begun = asyncio.create_task(engines.all_begun.wait())
            await asyncio.wait([begun, *sessions], return_when=asyncio.FIRST_COMPLETED)
            before, scripted, started = engines.counts(), engines.scripted_s(), time.process_time()
            while engines.counts()["decode"] - before["decode"] < load.rounds * load.engines:
                await asyncio.sleep(0.05)
            script_s, routes_s = (now - then for now, then in zip(engines.scripted_s(), scripted, strict=True))
            spent = time.process_time() - started - script_s - routes_s
            done = engines.counts() - before
        finally:
            for session in sessions:
                session.cancel()
            await asyncio.gather(*sessions, return_exceptions=True)
    rounds = done["decode"]
    return {
        "scheduler_ms": round(1e3 * spent / (rounds + done["prefill"]), 3),
        "round_ms": round(1e3 * spent / rounds, 3),
        "routes_ms": round(1e3 * routes_s / rounds, 3),
        "rounds": rounds,
        "prefill_calls_per_round": round(done["prefill"] / rounds, 3),
        "messages_per_round": round(done["messages"] / rounds, 3),
        "prefilled_per_round": round(done["prefilled"] / rounds, 1),
        "ms_per_message": round(1e3 * spent / done["messages"], 3),
    }


def measure_engines(load: EngineLoad) -> dict[str, Any]:
    """Returns host milliseconds per device call and engine in the steady state, when every session has had a message.

    A round is a decode call and, where contexts are incomplete, a prefill call before it. Copying the bytes of routes
    together (routes_ms of a round) is not in the other numbers.
    """
    configure_cpu(SHARDS)
    return asyncio.run(_measure(load))


def measure_admission(shards: int, rows: int, requests: int) -> float:
    """Returns CPU seconds in which one engine admits requests of other contexts, all of which wait at once.

    shards * rows - requests of them run already.
    """
    rng = np.random.default_rng(0)
    scheduler = Scheduler(Limits(64, rows * 512, shards, rows, PREFILL_SHAPES, 8, fitting=rows, most_ahead=1))

    def submit(n: int) -> None:
        for _ in range(n):
            scheduler.submit(SequenceState(token_array(rng.integers(0, VOCABULARY, 2048).tolist()), 1024))

    submit(shards * rows - requests)
    scheduler.start(scheduler.schedule())
    submit(requests)
    started = time.process_time()
    scheduler.schedule()
    spent = time.process_time() - started
    assert len(scheduler.running) == shards * rows, "a request was not admitted"
    return round(spent, 4)
