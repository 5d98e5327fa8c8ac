"""EngineSession: the requests of one conversation to a Sampler. SessionSlots: which of those that wait opens next."""

import asyncio
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
        self._closed = False

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
        self._handle = handle
        return handle


class SessionSlots:
    """At most `slots` sessions are open at the same time, so that their contexts fit into the cache."""

    def __init__(self, slots: int, raise_if_ended: Callable[[], None]) -> None:
        """raise_if_ended: raises what ended the serving, to sessions that wait."""
        self._slots, self._raise_if_ended = slots, raise_if_ended
        self._open: set[EngineSession] = set()
        self._n_ahead = 0  # of those that wait
        self._changed = asyncio.Event()

    async def open(self, make: Callable[[], EngineSession], *, ahead: bool) -> EngineSession:
        """Returns make() as soon as there is room for a session.

        ahead: opens before those that wait without it.
        """
        self._raise_if_ended()
        self._n_ahead += ahead
        try:
            while len(self._open) >= self._slots or (self._n_ahead and not ahead):
                self._changed.clear()
                await self._changed.wait()
                self._raise_if_ended()
        finally:
            if ahead:
                self._n_ahead -= 1
                self.wake()  # the others may open again, once nobody is ahead of them
        session = make()
        self._open.add(session)
        return session

    def close(self, session: EngineSession) -> None:
        """Makes room for another session."""
        self._open.discard(session)
        self.wake()

    def wake(self) -> None:
        """Makes those that wait look again, also at whether the serving has ended."""
        self._changed.set()
