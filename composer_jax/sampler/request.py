"""Request: what is to be sampled. RequestHandle: a request in the engine, from its submission to its Sample."""

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Callable, Generator, Hashable, Sequence

import numpy as np

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.sampler.detokenizer import Decode, IncrementalDetokenizer
from composer_jax.sampler.drafts import PromptLookup
from composer_jax.sampler.policy import FinishReason, PromptLogprobs, Sample, SampleChunk, TopLogprobs
from composer_jax.sampler.runner import NewScores, NewTokens, RowRequest
from composer_jax.sampler.sequence import CacheLease, SequenceState, token_array


@dataclasses.dataclass(frozen=True)
class Request:
    """A message to be sampled after a context."""

    tokens: Sequence[int]
    """The context."""
    params: SamplingParams
    seed: int = 0
    """Fixes, with the position of a token, the random choice of it; modulo 2**32."""
    priority: int = 0
    """Of waiting requests, those of the largest priority run first."""
    group: Hashable = None
    """Groups take turns: of equal priorities, the group with the fewest running requests comes first."""
    lease: CacheLease | None = None
    """Keeps the pages of the context for the lease's next request."""

    def __post_init__(self) -> None:
        if (start := self.params.routing_start) > len(self.tokens):
            raise UserError(f"routing_start={start} is beyond the {len(self.tokens)} tokens of the context; use less.")


class RequestHandle:
    """Awaiting a handle returns its Sample; iterating over it yields SampleChunks as decode calls finish.

    The last chunk has the finish reason. A reader that is late gets what it missed in one chunk. Cancelling the task
    that awaits, or leaving the iteration, cancels the request.
    """

    def __init__(
        self, request: Request, budget: int, end_tokens: Sequence[int], decode: Decode | None, future: asyncio.Future
    ) -> None:
        """budget: most tokens to sample. decode: text of token ids, which stop strings need."""
        self.request, self.future = request, future
        params = request.params
        tokens, uses_cache = token_array(request.tokens), not params.prompt_logprobs
        self.sequence = SequenceState(tokens, budget, request.priority, request.group, request.lease, uses_cache)
        self.row = RowRequest(self.sequence, request.seed % 2**32, params)
        """What decode calls need to know of it."""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.raw_logprobs: list[float] = []
        self.versions: list[int] = []
        self.top_logprobs: list[TopLogprobs] | None = [] if params.top_logprobs else None
        n = len(request.tokens)
        self.prompt = PromptLogprobs([None] * n, [{} for _ in range(n)]) if params.prompt_logprobs else None
        self.lookup = PromptLookup()
        self.drafts: list[int] = []
        self._end_ids = {*end_tokens, *params.stop_ids}
        self._settled = 0  # tokens that `settle` has seen
        self._progress = asyncio.Event()
        self.on_cancel: Callable[[RequestHandle], None] = lambda _: None
        """Called by `cancel` before the event loop reports the end to others."""
        self._stop_text = None
        if params.stop_strings:
            assert decode is not None, "a sampler refuses stop strings without a decoder"
            self._stop_text = _StopText(params.stop_strings, decode)
        future.add_done_callback(lambda _: self._progress.set())

    def __await__(self) -> Generator[None, None, Sample]:
        return self.future.__await__()

    async def __aiter__(self) -> AsyncGenerator[SampleChunk]:
        start = 0
        try:
            while not self.future.cancelled():
                self._progress.clear()
                done, end = self.future.done(), self._settled
                reason = self.future.result().finish_reason if done else None  # raises what ended the serving
                if start < end or done:
                    part = slice(start, end)
                    top = None if self.top_logprobs is None else self.top_logprobs[part]
                    raw = self.raw_logprobs[part]
                    yield SampleChunk(self.tokens[part], self.logprobs[part], self.versions[part], reason, raw, top)
                    start = end
                if done:
                    return
                await self._progress.wait()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Ends the request; its pages are free before the next device call."""
        if self.future.cancel():
            self.on_cancel(self)

    # -- for the engine ------------------------------------------------------------------------------------------

    def extend(self, new: NewTokens, version: int) -> FinishReason | None:
        """Appends what one decode call sampled, up to the end of the message; returns why it ended, or None.

        A decode call stops at end tokens by itself. Stops of the request are found here, and tokens that the call
        sampled after one are dropped.
        """
        n = None
        if self._stop_text is not None or not self._end_ids.isdisjoint(new.tokens):
            n = next((n for n, token in enumerate(new.tokens, 1) if self._ends(token)), None)
        self.drafts = new.drafts
        self.tokens += new.tokens
        self.logprobs += new.logprobs
        self.raw_logprobs += new.raw_logprobs
        self.versions += [version] * len(new.tokens)
        if self.top_logprobs is not None:
            self.top_logprobs += new.top_logprobs or []
        if n is not None:
            self._drop_last(len(new.tokens) - n)
        self._settled = len(self.tokens)
        self._progress.set()
        if n is not None:
            return "stop"
        return "length" if self.sequence.budget == 0 else None

    def _drop_last(self, n: int) -> None:
        """Drops the last n sampled tokens."""
        end = len(self.tokens) - n
        for values in (self.tokens, self.logprobs, self.raw_logprobs, self.versions, self.top_logprobs or []):
            del values[end:]

    def add_scores(self, start: int, scores: NewScores) -> None:
        """Takes what a prefill call says about the tokens after `start` and those that follow it."""
        assert self.prompt is not None, "nobody asked for the log-probabilities of the context"
        most = self.request.params.top_logprobs
        # A request that was preempted computes what it sampled again, which is not of the context.
        for i in range(start + 1, min(start + 1 + len(scores.logprobs), len(self.prompt.logprobs))):
            self.prompt.logprobs[i] = scores.logprobs[i - start - 1]
            top = scores.top_logprobs[i - start - 1]
            self.prompt.top_logprobs[i] = dict(itertools.islice(top.items(), most))

    def finish(self, reason: FinishReason, routing: np.ndarray | None = None) -> None:
        """Resolves the future."""
        self.future.set_result(
            Sample(
                self.tokens,
                self.logprobs,
                self.versions,
                reason,
                self.raw_logprobs,
                cached=self.sequence.cached or 0,
                top_logprobs=self.top_logprobs,
                prompt=self.prompt,
                routing=routing,
                routing_start=self.request.params.routing_start,
            )
        )

    def _ends(self, token: int) -> bool:
        completes_text = self._stop_text is not None and self._stop_text.add(token)
        return completes_text or token in self._end_ids


class _StopText:
    """Finds the first token that completes one of some texts."""

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self._strings, self._detokenizer, self._tail = strings, IncrementalDetokenizer(decode), ""
        self._longest = max(map(len, strings))

    def add(self, token: int) -> bool:
        """Whether this token, after those before it, completes a text."""
        text = self._tail + self._detokenizer.add([token])
        self._tail = text[max(0, len(text) - self._longest + 1) :]
        return any(string in text for string in self._strings)
