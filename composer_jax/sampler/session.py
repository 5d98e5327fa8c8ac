"""SlotSession: one conversation of a Sampler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from composer_jax.errors import UserError
from composer_jax.sampler.policy import Sample, SampleChunk, SamplingParams
from composer_jax.sampler.request import Request

if TYPE_CHECKING:
    from composer_jax.sampler.engine import Sampler


class SlotSession:
    """A Session (sampler/policy.py) on one slot of a Sampler."""

    def __init__(self, sampler: Sampler, slot: int, seed: int):
        self._sampler, self._slot, self._seed = sampler, slot, seed % 2**32
        self.length, self.capacity = 0, sampler.config.capacity
        self._branch = 0
        self._request: Request | None = None

    async def sample(self, delta: Sequence[int], params: SamplingParams) -> Sample:
        """See Session.sample.

        Raises:
          ValueError: an empty delta, or delta and one token would not fit into the capacity.
          UserError: stop strings, and the sampler has no decoder.
        """
        context = self.length + len(delta)
        sample = await self._submit(delta, params).future
        self.length = context + len(sample.tokens)
        return sample

    async def stream(self, delta: Sequence[int], params: SamplingParams) -> AsyncGenerator[SampleChunk]:
        """Like `sample`, but yields the tokens as decode calls finish; the last chunk has the finish reason.

        Closing the iterator early ends the message after the chunks that it yielded. So does the session's next call.
        """
        chunks: asyncio.Queue[SampleChunk | None] = asyncio.Queue()
        context = self.length + len(delta)
        request = self._submit(delta, params, chunks.put_nowait)
        request.future.add_done_callback(lambda _: chunks.put_nowait(None))
        try:
            while (chunk := await chunks.get()) is not None:
                if request is not self._request:
                    return
                context += len(chunk.tokens)
                self.length = context
                yield chunk
            if not request.future.cancelled():
                request.future.result()  # raises what ended the serving
        finally:
            request.future.cancel()

    def reset(self) -> None:
        """See Session.reset."""
        self._end_request()
        self.length = 0
        self._branch += 1

    def close(self) -> None:
        """See Session.close. Closing twice has no effect."""
        if self._slot is not None:
            self._end_request()
            self._sampler.release(self._slot)
            self._slot = None

    def _submit(
        self, delta: Sequence[int], params: SamplingParams, on_chunk: Callable[[SampleChunk], None] | None = None
    ) -> Request:
        """Checks a call and hands it to the sampler."""
        if self._slot is None:
            raise RuntimeError("this session is closed")
        if not len(delta):
            raise ValueError("delta is empty; give the tokens that the sample follows")
        if params.stop_strings and self._sampler.decode is None:
            raise UserError(
                f"stop_strings={params.stop_strings!r} needs a Sampler with decode=, the text of token ids."
            )
        budget = min(params.max_tokens, self.capacity - self.length - len(delta))
        if budget < 1:
            raise ValueError(f"{len(delta)} tokens after {self.length} leave no room in a context of {self.capacity}")
        self._end_request()
        # Positions repeat after a reset. Each branch has its own seed, so that random choices do not repeat.
        seed = (self._seed + 0x9E3779B9 * self._branch) % 2**32
        self._request = Request(
            self._slot,
            self.length,
            np.asarray(delta, np.int32),
            budget,
            seed,
            params,
            asyncio.get_running_loop().create_future(),
            self._sampler.decode,
            on_chunk,
        )
        self._sampler.submit(self._request)
        return self._request

    def _end_request(self) -> None:
        """Ends a stream that was left before its end."""
        if self._request is not None:
            self._request.future.cancel()
            self._request = None
