"""Requests of different parameters share decode calls; stops on the host leave a context that goes on; streams."""

import asyncio
import contextlib
import itertools

import numpy as np
import pytest

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.policy import Sample
from composer_jax.sampler.sampler import Sampler
from tests.compilations import compiles_nothing
from tests.models.small import forward, rows
from tests.sampler.conversations import CONFIG, END, Branch, learner_logprobs, run_all

PARAMS = [
    SamplingParams(20),
    SamplingParams(20, temperature=0),
    SamplingParams(20, temperature=0.5, top_p=0.7),
    SamplingParams(20, top_k=3),
    SamplingParams(20, temperature=1.7, top_p=0.9, top_k=9),
    SamplingParams(20, stop_ids=(5, 7)),
]
PROMPT = [3, 9, 14]


def decode(ids) -> str:
    """Id 0 is END, the others are the letters from a."""
    return "".join(chr(ord("a") + i - 1) if i != END else "" for i in ids)


@pytest.fixture(scope="module")
def sampler(new_sampler, weights):
    like = new_sampler()
    sampler = Sampler(like.definition, like.mesh, like.config, end_tokens=(END,), decode=decode)
    sampler.update(*weights, version=3)
    return sampler


async def sample_alone(sampler, params, seed=1, delta=PROMPT) -> Sample:
    session = await sampler.open(seed)
    try:
        return await session.sample(delta, params)
    finally:
        session.close()


def sample_all(sampler, requests, seed=1) -> list[Sample]:
    async def main():
        async with sampler.serving():
            return await asyncio.gather(*(sample_alone(sampler, params, seed) for params in requests))

    return asyncio.run(asyncio.wait_for(main(), 120))


def network_logits(weights, tokens: list[int]) -> np.ndarray:
    """Logits [S,W] of the forward pass."""
    batch = rows([[tokens]] + [[]] * 7, 64)
    return np.asarray(forward(CONFIG)(*weights, batch)["logits"], np.float64)[0, : len(tokens)]


def test_requests_of_different_parameters_share_calls_and_recompile_nothing(sampler):
    alone = [sample_all(sampler, [params])[0] for params in PARAMS]
    sample_all(sampler, PARAMS)
    busy = sampler.decoded_tokens
    with compiles_nothing():
        for order in (PARAMS, PARAMS[::-1]):
            together = sample_all(sampler, order)
            for params, sample in zip(order, together, strict=True):
                expected = alone[PARAMS.index(params)]
                assert sample.tokens == expected.tokens and sample.finish_reason == expected.finish_reason
                np.testing.assert_allclose(sample.logprobs, expected.logprobs, atol=2e-5)
        other = [SamplingParams(9, temperature=t, top_p=p, top_k=k) for t, p, k in [(0.3, 0.2, 2), (2.0, 0.99, 11)]]
        sample_all(sampler, other)
    assert sampler.decoded_tokens > busy


def test_default_requests_keep_their_bits_beside_others(sampler):
    """The program with parameters computes what the program without them does."""
    alone, beside = sample_all(sampler, PARAMS[:1])[0], sample_all(sampler, PARAMS)[0]
    assert alone.tokens == beside.tokens
    np.testing.assert_allclose(alone.logprobs, beside.logprobs, atol=1e-6)


def test_greedy_takes_the_networks_likeliest_tokens(sampler, weights):
    sample = sample_all(sampler, [SamplingParams(20, temperature=0, top_p=0.5, top_k=2)])[0]
    assert sample.tokens == sample_all(sampler, [SamplingParams(20, temperature=0)], seed=2)[0].tokens
    tokens = PROMPT + sample.tokens
    logits = network_logits(weights, tokens)[len(PROMPT) - 1 : -1]
    assert sample.tokens == logits.argmax(-1).tolist()
    branch = Branch(tokens, [np.nan] * 3 + sample.logprobs)
    expected = learner_logprobs(CONFIG, weights, [branch], 64)[0]
    np.testing.assert_allclose(sample.logprobs, expected[3:], atol=1e-4)


def test_logprobs_are_those_of_the_distribution_that_was_drawn_from(sampler, weights):
    sample = sample_all(sampler, [SamplingParams(30, temperature=0.6, top_k=3)])[0]
    logits = network_logits(weights, PROMPT + sample.tokens)[len(PROMPT) - 1 : -1] / 0.6
    for token, logprob, row in zip(sample.tokens, sample.logprobs, logits, strict=True):
        kept = np.sort(row)[-3:]
        assert row[token] >= kept[0]
        assert logprob == pytest.approx(row[token] - np.log(np.exp(kept).sum()), abs=1e-4)


def long_sample(sampler) -> tuple[int, Sample]:
    """A seed whose message goes over several decode calls, and the message."""
    for seed in range(100):
        sample = sample_all(sampler, [SamplingParams(30)], seed)[0]
        if len(set(sample.tokens[:10])) > 5 and len(sample.tokens) > 12:
            return seed, sample
    raise AssertionError("every message is short")


def cut_after(sample: Sample, count: int) -> tuple:
    return sample.tokens[:count], sample.logprobs[:count], sample.versions[:count], "stop"


def as_tuple(sample: Sample) -> tuple:
    return sample.tokens, sample.logprobs, sample.versions, sample.finish_reason


def test_a_message_stops_at_the_first_stop_id(sampler):
    seed, whole = long_sample(sampler)
    for token in set(whole.tokens[:10]):
        stopped = sample_all(sampler, [SamplingParams(30, stop_ids=(token, 99))], seed)[0]
        assert as_tuple(stopped) == cut_after(whole, whole.tokens.index(token) + 1)


def test_a_message_stops_at_the_token_that_completes_a_stop_string(sampler):
    seed, whole = long_sample(sampler)
    text = decode(whole.tokens)
    for start, length in itertools.product(range(10), (1, 2, 3, 5)):
        stop = text[start : start + length]
        stopped = sample_all(sampler, [SamplingParams(30, stop_strings=("no such text", stop))], seed)[0]
        assert as_tuple(stopped) == cut_after(whole, text.index(stop) + length)


def test_several_end_tokens(new_sampler, weights, sampler):
    seed, whole = long_sample(sampler)
    ends = (END, whole.tokens[4], whole.tokens[6])
    both = Sampler(sampler.definition, sampler.mesh, sampler.config, end_tokens=ends)
    both.update(*weights, version=3)
    stopped = sample_all(both, [SamplingParams(30)], seed)[0]
    first = min(whole.tokens.index(token) for token in ends[1:])
    assert stopped.tokens == whole.tokens[: first + 1] and stopped.finish_reason == "stop"
    endless = Sampler(sampler.definition, sampler.mesh, sampler.config, end_tokens=())
    endless.update(*weights, version=3)
    sample = sample_all(endless, [SamplingParams(50)], seed)[0]
    assert len(sample.tokens) == 50 and sample.finish_reason == "length"


@pytest.mark.parametrize("stop", ["id", "string", "closed stream"])
def test_the_context_goes_on_after_the_kept_tokens(sampler, weights, stop):
    """What the device sampled after a stop is overwritten: later log-probabilities are those of the kept tokens."""
    seed, whole = long_sample(sampler)

    async def first(session) -> list[int]:
        if stop == "id":
            return (await session.sample(PROMPT, SamplingParams(30, stop_ids=(whole.tokens[1],)))).tokens
        if stop == "string":
            return (await session.sample(PROMPT, SamplingParams(30, stop_strings=(decode(whole.tokens[1:3]),)))).tokens
        async with contextlib.aclosing(session.stream(PROMPT, SamplingParams(30))) as chunks:
            return (await anext(chunks)).tokens

    async def main():
        async with sampler.serving():
            session = await sampler.open(seed)
            tokens = PROMPT + await first(session) + [4, 6]
            assert len(tokens) < len(PROMPT + whole.tokens)
            second = await session.sample(tokens, SamplingParams(12))
            session.close()
            return tokens, second

    tokens, second = asyncio.run(asyncio.wait_for(main(), 120))
    branch = Branch(tokens + second.tokens, [np.nan] * len(tokens) + second.logprobs)
    expected = learner_logprobs(CONFIG, weights, [branch], 64)[0][len(tokens) :]
    np.testing.assert_allclose(second.logprobs, expected, atol=1e-4)


def test_a_stream_gives_the_tokens_of_a_sample_as_calls_finish(sampler):
    seed, whole = long_sample(sampler)
    requests = [SamplingParams(30), SamplingParams(30, stop_ids=(whole.tokens[9],)), SamplingParams(4), PARAMS[4]]

    async def stream(params):
        session = await sampler.open(seed)
        chunks = [chunk async for chunk in session.stream(PROMPT, params)]
        session.close()
        return chunks

    async def main():
        async with sampler.serving():
            return await asyncio.gather(*map(stream, requests))

    for params, chunks in zip(requests, asyncio.run(asyncio.wait_for(main(), 120)), strict=True):
        expected = sample_all(sampler, [params], seed)[0]
        assert [token for chunk in chunks for token in chunk.tokens] == expected.tokens
        assert [version for chunk in chunks for version in chunk.versions] == expected.versions
        logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
        np.testing.assert_allclose(logprobs, expected.logprobs, atol=2e-5)
        assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + [expected.finish_reason]
        assert all(0 < len(c.tokens) <= sampler.config.decode_steps for c in chunks[:-1])
    assert len(chunks) >= 1 and len(whole.tokens) > 3 * sampler.config.decode_steps - 1


def test_a_call_ends_the_stream_before_it(sampler):
    async def main():
        async with sampler.serving():
            session = await sampler.open(long_sample_seed)
            stream = session.stream(PROMPT, SamplingParams(30))
            first = await anext(stream)
            await session.sample(PROMPT, SamplingParams(5), branch=1)
            assert [chunk async for chunk in stream] == []
            session.close()
            return first

    long_sample_seed, whole = long_sample(sampler)
    assert asyncio.run(asyncio.wait_for(main(), 120)).tokens == whole.tokens[: sampler.config.decode_steps]


def test_a_stream_whose_serving_ends_raises(sampler):
    seed, _ = long_sample(sampler)

    async def main():
        async with sampler.serving():
            session = await sampler.open(seed)
            stream = session.stream(PROMPT, SamplingParams(30))
            await anext(stream)
        with pytest.raises(RuntimeError, match="stopped serving"):
            async for _ in stream:
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_stop_strings_without_a_decoder_are_refused(new_sampler):
    with pytest.raises(UserError, match="needs a Sampler with decode="):
        sample_all(new_sampler(), [SamplingParams(5, stop_strings=("x",))])


def test_serving_twice_at_once_is_refused(sampler):
    async def main():
        async with sampler.serving():
            async with sampler.serving():
                raise AssertionError("not reached")

    with pytest.raises(RuntimeError, match="serving already"):
        asyncio.run(main())
    run_all(sampler, [1], turns=1)


def test_shared_weights_are_not_copied(new_sampler, weights):
    config = SamplerConfig(slots=2, max_model_len=16, prefill_shapes=((2, 8),))
    mesh = new_sampler().mesh
    shared = Sampler(new_sampler().definition, mesh, config, end_tokens=(END,))
    shared.update(*weights, version=1, copy=False)
    for ours, theirs in zip(shared.engines[0].runner._weights[0].values(), weights[0].values(), strict=True):
        if not isinstance(ours, dict):
            assert ours.unsafe_buffer_pointer() == theirs.unsafe_buffer_pointer()
