"""One call of a session, from its submission to its Sample: what is still to be prefilled, what was sampled."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from composer_jax.sampler.detokenizer import Decode, IncrementalDetokenizer
from composer_jax.sampler.policy import Sample, SampleChunk, SamplingParams


@dataclasses.dataclass(eq=False)
class Request:
    """Belongs to one slot. The engine appends what a decode call sampled, then calls `settle`."""

    slot: int
    start: int
    """Tokens of the slot's context that are in the cache, before those sampled for this request."""
    pending: np.ndarray
    """int32: tokens still to be prefilled."""
    budget: int
    """Tokens that may still be sampled."""
    seed: int
    params: SamplingParams
    future: asyncio.Future[Sample]
    decode: Decode | None = None
    """Text of token ids; needed where params.stop_strings is not empty."""
    on_chunk: Callable[[SampleChunk], None] | None = None
    """Called with what each decode call sampled."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    _settled: int = 0  # tokens that `settle` has seen

    def __post_init__(self) -> None:
        self._stop_text = None
        if self.params.stop_strings:
            assert self.decode is not None, "SlotSession refuses stop strings without a decoder"
            self._stop_text = _StopText(self.params.stop_strings, self.decode)

    def extend(self, tokens: list[int], logprobs: list[float], version: int) -> None:
        """Appends what one decode call sampled."""
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += [version] * len(tokens)
        self.budget -= len(tokens)

    def settle(self, end_tokens: Sequence[int]) -> bool:
        """Cuts the new tokens after the first that ends the message, and publishes them; returns whether it ended.

        A decode call stops at end tokens by itself. Stops of the request are found here: tokens that the call sampled
        after one are dropped, and the session's next delta overwrites them in the cache.
        """
        if self.future.done():  # cancelled
            return True
        reason: Literal["stop", "length"] | None = "length" if self.budget == 0 else None
        first = self._settled
        for at in range(first, len(self.tokens)):
            if self._ends(self.tokens[at], end_tokens):
                reason = "stop"
                for values in (self.tokens, self.logprobs, self.versions):
                    del values[at + 1 :]
                break
        self._settled = len(self.tokens)
        if self.on_chunk is not None and (reason is not None or first < self._settled):
            self.on_chunk(SampleChunk(self.tokens[first:], self.logprobs[first:], self.versions[first:], reason))
        if reason is not None:
            self.future.set_result(Sample(self.tokens, self.logprobs, self.versions, reason))
        return reason is not None

    def _ends(self, token: int, end_tokens: Sequence[int]) -> bool:
        completes_text = self._stop_text is not None and self._stop_text.add(token)
        return completes_text or token in end_tokens or token in self.params.stop_ids


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
