"""A Policy without a network: each session samples the messages of a script."""

import asyncio
import contextlib

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.sampler.policy import Sample


class ScriptedSession:
    """Samples the messages (lists of token ids) in order, whatever the context is."""

    def __init__(self, policy, messages, max_model_len):
        self.policy, self.messages, self.max_model_len = policy, iter(messages), max_model_len

    async def sample(self, context, params: SamplingParams, branch=0) -> Sample:
        message = next(self.messages)
        tokens = message[: params.max_tokens]
        self.policy.decoded_tokens += len(tokens)
        finish_reason = "stop" if len(tokens) == len(message) else "length"
        return Sample(tokens, [-0.5] * len(tokens), [self.policy.version] * len(tokens), finish_reason)

    def close(self):
        self.policy.free.release()


class ScriptedPolicy:
    """`script(seed)` returns the messages of the session with that seed; at most `slots` sessions are open at once."""

    def __init__(self, script, slots=2, max_model_len=4096):
        self.script, self.slots, self.max_model_len = script, slots, max_model_len
        self.version, self.busy_seconds, self.decoded_tokens = 0, 0.0, 0

    def update(self, params, router_bias, version):
        self.version = version

    @contextlib.asynccontextmanager
    async def serving(self):
        self.free = asyncio.Semaphore(self.slots)
        yield

    async def open(self, seed) -> ScriptedSession:
        await self.free.acquire()
        return ScriptedSession(self, self.script(seed), self.max_model_len)
