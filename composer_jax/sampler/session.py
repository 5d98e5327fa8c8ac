"""EngineSession: the requests of one conversation to a Sampler."""

import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.sampler.policy import Sample, SampleChunk
from composer_jax.sampler.request import Request, RequestHandle
from composer_jax.sampler.sequence import CacheLease

GOLDEN = 0x9E3779B9
"""2**32 divided by the golden ratio: its multiples spread over all numbers of 32 bits."""


class EngineSession:
    """A Session (sampler/policy.py) of a Sampler. Each call cancels the one before, if that was left before its end."""

    def __init__(
        self,
        submit: Callable[[Request], RequestHandle],
        max_model_len: int,
        seed: int,
        on_close: Callable[["EngineSession"], None],
    ) -> None:
        """submit, max_model_len: those of the Sampler and its config."""
        self.max_model_len = max_model_len
        self.lease = CacheLease()
        self._submit_request, self._seed, self._on_close = submit, seed, on_close
        self._handle: RequestHandle | None = None
        self._closed, self._longest = False, 0

    @property
    def most_tokens(self) -> int:
        """Tokens of the session's longest context so far, sampled ones included."""
        return max(self._longest, 0 if self._handle is None else len(self._handle.sequence.tokens))

    async def sample(self, context: Sequence[int], params: SamplingParams, branch: int = 0) -> Sample:
        """See Session.sample; raises what Sampler.submit raises."""
        return await self._submit(context, params, branch)

    async def stream(
        self, context: Sequence[int], params: SamplingParams, branch: int = 0
    ) -> AsyncGenerator[SampleChunk]:
        """Like `sample`, but yields the tokens as decode calls finish; the last chunk has the finish reason.

        Closing the iterator early cancels the request.
        """
        async with contextlib.aclosing(aiter(self._submit(context, params, branch))) as chunks:
            async for chunk in chunks:
                yield chunk

    def close(self) -> None:
        """See Session.close. Closing twice has no effect."""
        if not self._closed:
            self._closed = True
            if self._handle is not None:
                self._handle.cancel()
            self._on_close(self)

    def _submit(self, context: Sequence[int], params: SamplingParams, branch: int) -> RequestHandle:
        if self._closed:
            raise RuntimeError("this session is closed")
        # Positions repeat in branches, which must not repeat the random choices.
        seed = (self._seed + GOLDEN * branch) % 2**32
        handle = self._submit_request(Request(context, params, seed, lease=self.lease))
        if self._handle is not None:
            self._handle.cancel()
        self._longest, self._handle = self.most_tokens, handle
        return handle
