"""Pausing and resuming: every request is answered, and a pause changes no token."""

import asyncio

import pytest

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.sampler.request import Request
from composer_jax.sampler.sampler import Sampler

PROMPT = (3, 9, 14, 2, 7)
PARAMS = SamplingParams(40)


@pytest.fixture(scope="module")
def endless(new_sampler, weights):
    """A sampler of two slots whose messages end at their budgets."""
    like = new_sampler(slots=2)
    sampler = Sampler(like.definition, like.mesh, like.config, end_tokens=())
    sampler.update(*weights, version=3)
    return sampler


def sample_with_a_pause(sampler, mode):
    """Three requests, two of which run while the sampler is paused; returns samples and chunks of the first."""

    async def main():
        async with sampler.serving():
            handles = [sampler.submit(Request(PROMPT, PARAMS, seed)) for seed in range(3)]
            stream = aiter(handles[0])
            chunks = [await anext(stream)]
            await sampler.pause(mode)
            before, running = sampler.decoded_tokens, sampler.stats.running
            late = sampler.submit(Request(PROMPT, PARAMS, 3))
            await asyncio.sleep(0.05)
            assert sampler.decoded_tokens == before, "nothing is computed during a pause"
            answered = [handle.future.done() for handle in (*handles, late)]
            sampler.resume()
            chunks += [chunk async for chunk in stream]
            return [await handle for handle in (*handles, late)], chunks, answered, running

    return asyncio.run(asyncio.wait_for(main(), 120))


@pytest.fixture(scope="module")
def alone(endless):
    async def main():
        async with endless.serving():
            return [await endless.submit(Request(PROMPT, PARAMS, seed)) for seed in range(4)]

    return [sample.tokens for sample in asyncio.run(main())]


@pytest.mark.parametrize(
    ("mode", "answered", "running"),
    [("keep", [False] * 4, 2), ("wait", [True, True, False, False], 0)],
    ids=["keep", "wait"],
)
def test_a_pause_changes_no_token(endless, alone, mode, answered, running):
    samples, chunks, done, still_running = sample_with_a_pause(endless, mode)
    assert [sample.tokens for sample in samples] == alone and {s.finish_reason for s in samples} == {"length"}
    assert [token for chunk in chunks for token in chunk.tokens] == alone[0]
    assert done == answered and still_running == running


def test_aborting_answers_every_request_with_what_it_has(endless, alone):
    samples, chunks, done, running = sample_with_a_pause(endless, "abort")
    assert done == [True, True, True, False] and running == 0
    assert [s.finish_reason for s in samples] == ["cancelled"] * 3 + ["length"]
    assert 0 < len(samples[0].tokens) < 40 and samples[2].tokens == [] and samples[3].tokens == alone[3]
    assert (
        [token for chunk in chunks for token in chunk.tokens] == samples[0].tokens == alone[0][: len(samples[0].tokens)]
    )
    assert chunks[-1].finish_reason == "cancelled"


def test_weights_can_be_replaced_during_a_pause(endless, weights, alone):
    async def main():
        async with endless.serving():
            handle = endless.submit(Request(PROMPT, PARAMS, 0))
            await anext(aiter_without_cancel(handle))
            await endless.pause()
            await endless.update_serving(*weights, version=4)
            endless.resume()
            return await handle

    async def aiter_without_cancel(handle):
        while not handle.tokens:
            await asyncio.sleep(0.001)
        yield

    sample = asyncio.run(asyncio.wait_for(main(), 120))
    assert sample.tokens == alone[0] and set(sample.versions) == {3, 4}
    endless.update(*weights, version=3)


def test_a_serving_that_ends_during_a_pause_answers_all(endless):
    async def main():
        async with endless.serving():
            await endless.pause()
            handle = endless.submit(Request(PROMPT, PARAMS, 0))
        with pytest.raises(RuntimeError, match="stopped serving"):
            await handle

    asyncio.run(asyncio.wait_for(main(), 60))
