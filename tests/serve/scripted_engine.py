"""An engine whose messages a function writes: what the server needs of a Sampler, without a network."""

import asyncio
import contextlib
import types

from composer_jax.sampler.engine import SamplerStats
from composer_jax.sampler.request import RequestHandle
from composer_jax.sampler.runner import NewTokens


class ScriptedEngine:
    """write(context) -> ids that are sampled after it, three at a time."""

    def __init__(self, write, end_tokens, max_model_len=4096, delay=0.0):
        self.write, self.end_tokens, self.delay = write, end_tokens, delay
        self.config = types.SimpleNamespace(max_model_len=max_model_len)
        self.version, self.decoded_tokens, self.requests = 0, 0, []
        self.error, self.is_paused, self.checksums = None, False, ()
        self._tasks = set()

    @property
    def stats(self):
        return SamplerStats(0, len(self._tasks), 0, 100, len(self._tasks), 0, (), ())

    @contextlib.asynccontextmanager
    async def serving(self):
        try:
            yield self
        finally:
            for task in self._tasks:
                task.cancel()

    def submit(self, request):
        future = asyncio.get_running_loop().create_future()
        handle = RequestHandle(request, request.params.max_tokens, self.end_tokens, None, future)
        self.requests.append(request)
        task = asyncio.get_running_loop().create_task(self._answer(handle, self.write(list(request.tokens))))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        future.add_done_callback(lambda _: task.cancel() if future.cancelled() else None)
        return handle

    async def _answer(self, handle, ids):
        reason = None
        while reason is None:
            await asyncio.sleep(self.delay)
            part = ids[len(handle.tokens) : len(handle.tokens) + 3][: handle.sequence.budget]
            handle.sequence.budget -= len(part)
            reason = handle.extend(NewTokens(part, [-0.5] * len(part), [-0.25] * len(part)), self.version)
            self.decoded_tokens += len(part)
        handle.finish(reason)
