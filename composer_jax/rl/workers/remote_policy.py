"""RemotePolicy: the trainer's policy as a worker sees it. Token ids cross the connection, never text.

A session's next context usually begins with the last one and what was sampled, so only what follows is sent. Both ends
hold the tokens that they share; what the worker takes for shared always is a prefix of what the trainer holds.
"""

from collections.abc import Sequence

import numpy as np

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.rl.workers.channel import Channel
from composer_jax.rl.workers.messages import common_prefix, sample_from_frame
from composer_jax.sampler.policy import Sample


class RemotePolicy:
    """A Policy (sampler/policy.py) at the other end of a channel, for one episode."""

    def __init__(self, channel: Channel, episode: int):
        """episode: the trainer's number of the episode; its sessions end with it."""
        self._channel, self._episode = channel, episode

    async def open(self, seed: int) -> "RemoteSession":
        """See Policy.open. Raises ChannelClosed if the trainer is lost."""
        header, _ = await self._channel.call("open", {"episode": self._episode, "seed": seed})
        return RemoteSession(self._channel, self._episode, header["session"], header["max_model_len"])


class RemoteSession:
    """A Session (sampler/policy.py) at the other end of a channel."""

    def __init__(self, channel: Channel, episode: int, session: int, max_model_len: int):
        self.max_model_len = max_model_len
        self._channel, self._address = channel, {"episode": episode, "session": session}
        self._shared = np.empty(0, np.int32)

    async def sample(self, context: Sequence[int], params: SamplingParams, branch: int = 0) -> Sample:
        """See Session.sample. Raises ChannelClosed if the trainer is lost, RemoteError if its policy fails."""
        tokens = np.asarray(context, np.int32)
        start = common_prefix(self._shared, tokens)
        self._shared = tokens
        body = {**self._address, "start": start, "params": vars(params), "branch": branch}
        sample = sample_from_frame(*await self._channel.call("sample", body, [tokens[start:]]))
        if self._shared is tokens:  # no other call has begun meanwhile
            self._shared = np.concatenate([tokens, np.asarray(sample.tokens, np.int32)])
        return sample

    def close(self) -> None:
        self._channel.notify("close", self._address)
