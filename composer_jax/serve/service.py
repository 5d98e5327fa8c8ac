"""Service: requests of clients in the engine, within limits; what every endpoint shares."""

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.data.chat.text_processor import ContextOverflow, TextProcessor
from composer_jax.errors import UserError
from composer_jax.sampler.policy import Sample, SampleChunk
from composer_jax.sampler.request import Request, RequestHandle
from composer_jax.sampler.sampler import Sampler
from composer_jax.sampler.several_processes import UpdateMode
from composer_jax.sampler.weight_checksums import WeightChecksums
from composer_jax.serve.bodies import SamplingBody
from composer_jax.serve.errors import CONTEXT_LENGTH, ApiError
from composer_jax.serve.metrics import ServerMetrics
from composer_jax.serve.session_records import SessionRecords
from composer_jax.serve.traffic.consent import TrafficHeaders
from composer_jax.serve.traffic.events import EventLog
from composer_jax.serve.traffic.finished_turn import TurnRequest
from composer_jax.serve.traffic.writer import TrafficWriter


class InstallWeights(Protocol):
    """Installs the weights at an address in the sampler while it serves; callers hold Service.updating."""

    async def __call__(
        self,
        address: str,
        version: int,
        *,
        mode: UpdateMode = "recompute",
        checksums: WeightChecksums | None = None,
        anew: bool = False,
    ) -> None:
        """See stages/served_weights.py. Raises WeightMismatch or another UserError."""
        ...


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """What a client may ask for; beyond it a request is refused with one sentence."""

    body_bytes: int = 16 << 20
    queue: int = 512
    """Requests in the engine, running ones included."""
    queue_per_key: int = 512
    """Of them, those of one API key."""
    seconds: float = 1800.0
    """A request that takes longer ends with an error."""
    reader_seconds: float = 30.0
    """A client that does not take an event of its stream within this time is dropped."""


@dataclasses.dataclass(frozen=True)
class Client:
    """Who sent a request."""

    key: str = ""
    """Its API key."""
    session: str = ""
    """X-Session-ID; empty records nothing."""
    headers: TrafficHeaders = TrafficHeaders()


@dataclasses.dataclass(frozen=True)
class Choice:
    """One answer that is being sampled."""

    index: int
    prompt: list[int]
    handle: RequestHandle
    answer: str = ""
    """The id of all answers to the request, in OpenAI's API."""
    written: TurnRequest | None = None
    """What traffic on disk says of the request; None if it is not written."""


class Service:
    """The engine behind the endpoints."""

    def __init__(
        self,
        sampler: Sampler,
        text: TextProcessor,
        limits: ServerLimits,
        install_weights: InstallWeights | None = None,
        traffic: TrafficWriter | None = None,
    ) -> None:
        """The model is served under the name of `text`. The sampler serves while requests come.

        traffic: writes the turns of users who consent; the service closes it.
        """
        self.sampler, self.text, self.name, self.limits = sampler, text, text.name, limits
        self.install_weights = install_weights
        self.records, self.metrics = SessionRecords(), ServerMetrics(sampler, traffic)
        self.traffic, self.events = traffic, None if traffic is None else EventLog(traffic)
        self.created = int(time.time())
        self.records_sessions = False
        """Whether somebody can read the records."""
        self.health: dict[str, Any] = {}
        """What /health says beside the state of the engine and its weights."""
        self.updating = asyncio.Lock()
        """Held while new weights are loaded and installed."""
        self._active: Counter[str] = Counter()
        self._handles: set[RequestHandle] = set()

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest context."""
        return self.sampler.config.max_model_len

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for another model than the one that is served; None and "" are that one."""
        if name and name != self.name:
            raise ApiError(
                f"the model {name!r} is not served here; use {self.name!r}.",
                status=404,
                code="model_not_found",
                param="model",
            )

    def context_error(self, reason: str, param: str | None = None, *, status: int = 400) -> ApiError:
        """Returns the answer to a request that does not fit into the context.

        Clients know it by its code. LiteLLM, and with it mini-swe-agent and OpenHands, knows it by the first words.
        """
        most = f"This model's maximum context length is {self.max_model_len} tokens"
        message = f"{most}; {reason}. Shorten the conversation, or ask for fewer tokens."
        return ApiError(message, status=status, code=CONTEXT_LENGTH, param=param)

    def prompt_error(self, error: UserError, param: str | None = None) -> ApiError:
        """Returns the answer to a prompt that the model cannot take."""
        if isinstance(error, ContextOverflow):
            return self.context_error(f"the prompt has {error.n_tokens}", param)
        return ApiError(f"{str(error).removesuffix('.')}.", param=param)

    def submit(
        self,
        prompts: Sequence[list[int]],
        body: SamplingBody,
        client: Client,
        answer: str,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[Choice]:
        """Queues body.n requests for each prompt.

        answer: the id of the answers. tools: those that the request declares.

        Raises ApiError for a parameter out of range, a prompt that does not fit, or a full queue.
        """
        n = body.n or 1
        if self.records.owner(client.session) not in (None, client.key):
            raise ApiError(f"the session {client.session!r} is another client's; use another id.", status=403)
        counts = [self._max_tokens(prompt, body.asked_tokens) for prompt in prompts]
        params = [body.sampling_params(self.text.defaults, count) for count in counts]
        self._check_queue(len(prompts) * n, client)
        written = None
        if self.traffic is not None:
            written = self.traffic.open_request(client.key, client.session, client.headers, answer, tools)
            if written is not None and self.traffic.keeps_routing:
                starts = [self.traffic.routes_from(written, prompt) for prompt in prompts]
                params = [_with_routes(one, start) for one, start in zip(params, starts, strict=True)]
        seed = secrets.randbits(32) if body.seed is None else body.seed
        choices: list[Choice] = []
        try:
            for prompt, params_of_prompt in zip(prompts, params, strict=True):
                for i in range(n):
                    request = Request(
                        prompt, params_of_prompt, (seed + i) % 2**32, body.priority, group=client.session or client.key
                    )
                    handle = self.sampler.submit(request)
                    choices.append(Choice(len(choices), prompt, handle, answer, written))
        except UserError as error:
            for choice in choices:
                choice.handle.cancel()
            raise ApiError(str(error)) from error
        for choice in choices:
            self._watch(choice, client)
        return choices

    async def finish(self, choices: Sequence[Choice]) -> list[Sample]:
        """Waits for all answers. Leaving the wait cancels them.

        Raises ApiError if the time is over, or the request was aborted.
        """
        try:
            async with asyncio.timeout(self.limits.seconds):
                await asyncio.wait([choice.handle.future for choice in choices])
            samples = [_result(choice) for choice in choices]
            for choice, sample in zip(choices, samples, strict=True):
                self._write(choice, len(sample.tokens))
            return samples
        except TimeoutError as error:
            raise self._overdue() from error
        finally:
            for choice in choices:
                choice.handle.cancel()

    async def stream(self, choices: Sequence[Choice]) -> AsyncIterator[tuple[Choice, SampleChunk]]:
        """Yields what the answers gain, as they do. Leaving the iteration cancels them; errors are as in `finish`."""
        queue: asyncio.Queue[tuple[Choice, SampleChunk] | Exception | None] = asyncio.Queue()
        sent: Counter[int] = Counter()

        async def read(choice: Choice) -> None:
            try:
                async with contextlib.aclosing(choice.handle.__aiter__()) as chunks:
                    async for chunk in chunks:
                        queue.put_nowait((choice, chunk))
                _result(choice)
                queue.put_nowait(None)
            except Exception as error:
                queue.put_nowait(error)

        readers = [asyncio.create_task(read(choice)) for choice in choices]
        left, deadline = len(choices), asyncio.get_running_loop().time() + self.limits.seconds
        try:
            while left:
                async with asyncio.timeout_at(deadline):
                    item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
                    sent[item[0].index] += len(item[1].tokens)
        except TimeoutError as error:
            raise self._overdue() from error
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            for choice in choices:
                choice.handle.cancel()
                self._write(choice, sent[choice.index])

    async def close(self) -> None:
        """Writes what traffic is still queued."""
        if self.traffic is not None and self.events is not None:
            await asyncio.to_thread(self.events.close)
            await asyncio.to_thread(self.traffic.close)

    def abort_all(self) -> int:
        """Cancels every request; returns their number."""
        handles = [handle for handle in self._handles if not handle.future.done()]
        for handle in handles:
            handle.cancel()
        return len(handles)

    def _overdue(self) -> ApiError:
        return ApiError(f"the request took longer than {self.limits.seconds:g} s; ask for less.", status=504)

    def _max_tokens(self, prompt: list[int], asked: int | None) -> int:
        """Most tokens to sample after a prompt: what is asked for, or all that the context holds."""
        room = self.max_model_len - len(prompt)
        if room < 1 or (asked is not None and asked > room):
            answer = "" if asked is None else f" and the answer {asked}"
            raise self.context_error(f"the prompt has {len(prompt)}{answer}")
        return room if asked is None else asked

    def _check_queue(self, n: int, client: Client) -> None:
        if n > (most := min(self.limits.queue, self.limits.queue_per_key)):
            raise ApiError(f"the request has {n} answers; ask for at most {most} at once.", param="n")
        for active, limit, whose in (
            (self._active[client.key], self.limits.queue_per_key, "this key"),
            (self._active.total(), self.limits.queue, "the server"),
        ):
            if active + n > limit:
                raise ApiError(
                    f"{whose} has {active} requests of at most {limit}; try again later.",
                    status=429,
                    code="rate_limit_exceeded",
                )

    def _write(self, choice: Choice, sent: int) -> None:
        """Gives traffic on disk an answer, of which the client was sent so many tokens."""
        if self.traffic is None or choice.written is None or not sent:
            return
        handle = choice.handle
        ended = handle.future.done() and not handle.future.cancelled() and handle.future.exception() is None
        sample = handle.future.result() if ended else None
        if sample is None or sent < len(sample.tokens):
            tokens, logprobs, versions = handle.tokens[:sent], handle.logprobs[:sent], handle.versions[:sent]
            raw, cached = handle.raw_logprobs[:sent], handle.sequence.cached or 0
            sample = Sample(tokens, logprobs, versions, "cancelled", raw, cached)
        sample = dataclasses.replace(sample, prompt=None, top_logprobs=None)  # not stored, and large
        request = handle.request
        self.traffic.offer(choice.written, choice.index, choice.prompt, sample, request.params, request.seed)

    def _watch(self, choice: Choice, client: Client) -> None:
        """Counts a request until it ends, and records it then."""
        self._active[client.key] += 1
        self._handles.add(choice.handle)
        started = time.perf_counter()

        def end(future: asyncio.Future[Sample]) -> None:
            self._active[client.key] -= 1
            self._active += Counter()  # forgets keys without requests
            self._handles.discard(choice.handle)
            if future.cancelled() or future.exception() is not None:
                self.metrics.failed.inc()
                return
            sample = future.result()
            self.metrics.note(len(choice.prompt), sample, time.perf_counter() - started)
            if client.session and self.records_sessions:
                self.records.add(client.session, client.key, choice.prompt, sample)

        choice.handle.future.add_done_callback(end)


def _with_routes(params: SamplingParams, start: int) -> SamplingParams:
    """Returns parameters that ask for the experts of tokens from `start` on, or from where the client asks for them."""
    start = min(start, params.routing_start) if params.return_routing else start
    return dataclasses.replace(params, return_routing=True, routing_start=start)


def _result(choice: Choice) -> Sample:
    """Returns an answer that has ended. Raises ApiError if the control plane ended it, and what ended the engine."""
    if choice.handle.future.cancelled():
        raise ApiError("the request was aborted; send it again.", status=503)
    return choice.handle.future.result()
