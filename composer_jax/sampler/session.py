"""EngineSession: the requests of one conversation to a Sampler."""

import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.sampler.policy import Sample, SampleChunk
from composer_jax.sampler.request import Request, RequestHandle
from composer_jax.sampler.sequence import CacheLease
from composer_jax.sampler.session_gate import Place, SessionGate

GOLDEN = 0x9E3779B9
"""2**32 divided by the golden ratio: its multiples spread over all numbers of 32 bits."""


class EngineSession:
    """A Session (sampler/policy.py) of a Sampler. Each call cancels the one before, if that was left before its end."""

    def __init__(
        self,
        submit: Callable[[Request], RequestHandle],
        max_model_len: int,
        seed: int,
        gate: SessionGate,
        place: Place,
        on_close: Callable[[CacheLease], None],
    ) -> None:
        """
        Args:
          submit, max_model_len: those of the Sampler and its config.
          gate, place: of the serving that opened the session, and its place there.
          on_close: called with the lease when the session is closed.
        """
        self.max_model_len = max_model_len
        self._lease = CacheLease()
        self._submit_request, self._seed, self._on_close = submit, seed, on_close
        self._gate, self._place = gate, place
        place.give_up_pages = lambda: on_close(self._lease)
        self._handle: RequestHandle | None = None
        self._closed = False

    async def sample(self, context: Sequence[int], params: SamplingParams, branch: int = 0) -> Sample:
        """See Session.sample; raises what Sampler.submit raises."""
        handle = await self._submit(context, params, branch)
        try:
            return await handle
        finally:
            self._note(handle)

    async def stream(
        self, context: Sequence[int], params: SamplingParams, branch: int = 0
    ) -> AsyncGenerator[SampleChunk]:
        """Like `sample`, but yields the tokens as decode calls finish; the last chunk has the finish reason.

        Closing the iterator early cancels the request.
        """
        handle = await self._submit(context, params, branch)
        try:
            async with contextlib.aclosing(aiter(handle)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._note(handle)

    def close(self) -> None:
        """See Session.close. Closing twice has no effect."""
        if not self._closed:
            self._closed = True
            if self._handle is not None:
                self._handle.cancel()
            self._on_close(self._lease)
            self._gate.close(self._place)

    async def _submit(self, context: Sequence[int], params: SamplingParams, branch: int) -> RequestHandle:
        """Queues a request as soon as the session may run one."""
        self._require_open()
        await self._gate.wait_for_turn(self._place)
        self._require_open()
        # Positions repeat in branches, which must not repeat the random choices.
        seed = (self._seed + GOLDEN * branch) % 2**32
        request = Request(context, params, seed, priority=int(self._place.ahead), lease=self._lease)
        handle = self._submit_request(request)
        if self._handle is not None:
            self._handle.cancel()
        self._handle = handle
        self._note(handle)
        return handle

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this session is closed")

    def _note(self, handle: RequestHandle) -> None:
        """Tells the gate how long the context of a request is by now."""
        if not self._closed:
            self._gate.note(self._place, len(handle.sequence.tokens))
