"""A suite beside training: its sessions go ahead, its temperature is its own, and its tokens have one version."""

import asyncio

import pytest

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.evals.pinned_policy import PinnedPolicy
from composer_jax.sampler.policy import Sample


class RecordingPolicy:
    """A TrainablePolicy with one session, which records what it is asked."""

    version, max_model_len = 3, 64

    def __init__(self):
        self.asked = []

    async def open(self, seed, *, ahead=False):
        self.asked.append((seed, ahead))
        return self

    async def sample(self, context, params, branch=0):
        self.asked.append((context, params, branch))
        return Sample([1, 2], [-0.5, -0.5], [3, self.version], "stop")

    def close(self):
        self.asked.append("closed")


def test_what_a_suite_asks_for():
    policy = RecordingPolicy()

    async def main():
        session = await PinnedPolicy(policy, 3, temperature=0.5).open(7)
        await session.sample([4], SamplingParams(9, temperature=1.0), branch=2)
        session.close()
        assert session.max_model_len == 64

    asyncio.run(main())
    assert policy.asked == [(7, True), ([4], SamplingParams(9, temperature=0.5), 2), "closed"]


def test_a_token_of_other_weights_is_an_error():
    policy = RecordingPolicy()
    policy.version = 4

    async def main():
        session = await PinnedPolicy(policy, 3, temperature=1.0).open(7)
        await session.sample([4], SamplingParams(9))

    with pytest.raises(RuntimeError, match="version 3 .* version 4"):
        asyncio.run(main())
