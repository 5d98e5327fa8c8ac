"""New weights while no device call is outstanding: every token knows the weights that it was sampled from."""

import asyncio

import jax
import numpy as np
import pytest

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.sampler.sampler import Sampler
from tests.sampler.conversations import CONFIG, Branch, learner_logprobs, run_all

PROMPT = [3, 9, 14, 2, 7]
TOKENS = 40


@pytest.fixture(scope="module")
def other(weights):
    return jax.tree.map(lambda w: 1.2 * w, weights[0]), weights[1]


@pytest.fixture(scope="module")
def endless(new_sampler, weights):
    """A sampler whose messages end at their budgets."""
    like = new_sampler()
    sampler = Sampler(like.definition, like.mesh, like.config, end_tokens=())
    sampler.update(*weights, version=3)
    return sampler


def sample_across_update(sampler, weights, other, mode):
    """A message during which the weights change from version 3 to 4, and one that was submitted after it."""

    async def main():
        async with sampler.serving():
            first, second = [await sampler.open(seed) for seed in (1, 2)]
            stream = first.stream(PROMPT, SamplingParams(TOKENS))
            chunks = [await anext(stream)]
            update = asyncio.create_task(sampler.update_serving(*other, version=4, mode=mode))
            await asyncio.sleep(0)
            late = asyncio.create_task(second.sample(PROMPT, SamplingParams(TOKENS)))
            chunks += [chunk async for chunk in stream]
            await update
            late = await late
            first.close()
            second.close()
            return chunks, late

    sampler.update(*weights, version=3)
    chunks, late = asyncio.run(asyncio.wait_for(main(), 120))
    joined = [
        [value for chunk in chunks for value in getattr(chunk, name)] for name in ("tokens", "logprobs", "versions")
    ]
    return joined, late


def expected_logprobs(weights, tokens):
    return learner_logprobs(CONFIG, weights, [Branch(PROMPT + tokens)], 64)[0][len(PROMPT) :]


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_a_running_message_goes_on_with_the_new_weights(endless, weights, other, mode):
    (tokens, logprobs, versions), late = sample_across_update(endless, weights, other, mode)
    n = versions.count(3)
    assert versions == [3] * n + [4] * (TOKENS - n) and 0 < n < TOKENS
    np.testing.assert_allclose(logprobs[:n], expected_logprobs(weights, tokens)[:n], atol=1e-4)
    exact = np.abs(np.array(logprobs[n:]) - expected_logprobs(other, tokens)[n:]).max() < 1e-4
    assert exact == (mode == "recompute"), "with keep, the entries of earlier tokens are those of the old weights"
    assert set(late.versions) == {4}
    np.testing.assert_allclose(late.logprobs, expected_logprobs(other, late.tokens), atol=1e-4)


def test_drain_ends_running_messages_with_the_old_weights(endless, weights, other):
    (tokens, logprobs, versions), late = sample_across_update(endless, weights, other, "drain")
    assert versions == [3] * TOKENS and set(late.versions) == {4}
    np.testing.assert_allclose(logprobs, expected_logprobs(weights, tokens), atol=1e-4)
    np.testing.assert_allclose(late.logprobs, expected_logprobs(other, late.tokens), atol=1e-4)


def test_weights_of_another_network_leave_the_old_ones(endless, weights, other):
    async def main():
        async with endless.serving():
            session = await endless.open(1)
            with pytest.raises(ValueError):
                await endless.update_serving({}, {}, version=9)
            sample = await session.sample(PROMPT, SamplingParams(5))
            session.close()
            return sample

    endless.update(*weights, version=3)
    sample = asyncio.run(main())
    assert set(sample.versions) == {3}
    np.testing.assert_allclose(sample.logprobs, expected_logprobs(weights, sample.tokens), atol=1e-4)


def test_weights_are_replaced_in_the_form_that_fits(endless, weights):
    with pytest.raises(RuntimeError, match="not serving"):
        asyncio.run(endless.update_serving(*weights, version=5))

    async def main():
        async with endless.serving():
            with pytest.raises(RuntimeError, match="update_serving"):
                endless.update(*weights, version=5)

    asyncio.run(main())
    assert run_all(endless, [1], turns=1)
