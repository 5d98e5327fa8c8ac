"""Log-probabilities beyond those of the sampled tokens: the likeliest tokens, and those of the context."""

import asyncio
import math

import numpy as np
import pytest

from composer_jax.data.chat.sampling_params import MOST_TOP_LOGPROBS, SamplingParams
from composer_jax.errors import UserError
from composer_jax.sampler.request import Request
from tests.compilations import compiles_nothing
from tests.models.small import forward, rows
from tests.sampler.conversations import CONFIG, sample_requests

RNG = np.random.default_rng(4)
PROMPTS = list(range(1, 17))
CONTEXTS = [RNG.integers(1, CONFIG.vocab_size, n).tolist() for n in (1, 5, 19, 40)]


@pytest.fixture(scope="module")
def warm(new_sampler):
    sampler = new_sampler(prefill_shapes=((8, 4), (2, 8)))
    sampler.warm_up(processed=True)
    return sampler


def network_logprobs(weights, tokens: list[int]) -> np.ndarray:
    """log p [tokens,W] of what follows each token, at temperature 1."""
    logits = np.asarray(forward(CONFIG)(*weights, rows([[tokens]], 64))["logits"][0, : len(tokens)], np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def check_top(top: dict[int, float], expected: np.ndarray, n: int) -> None:
    best = np.argsort(-expected)[:n]
    assert list(top) == best.tolist()
    np.testing.assert_allclose(list(top.values()), expected[best], atol=2e-5)


def test_scores_are_the_networks_whatever_is_cached_and_who_shares_the_call(warm, weights):
    asked = SamplingParams(4, temperature=0.5, top_logprobs=3, prompt_logprobs=True)
    plain = SamplingParams(4)
    requests = [Request(c, asked, i) for i, c in enumerate(CONTEXTS)] + [Request([7, *c], plain) for c in CONTEXTS]
    with compiles_nothing():
        sample_requests(warm, [Request(context, plain) for context in CONTEXTS])  # cached from here on
        samples = sample_requests(warm, requests)
    for context, sample in zip(CONTEXTS, samples[: len(CONTEXTS)], strict=True):
        expected = network_logprobs(weights, context + sample.tokens)
        assert sample.cached == 0
        assert sample.prompt.logprobs[0] is None and sample.prompt.top_logprobs[0] == {}
        following = [expected[i, token] for i, token in enumerate(context[1:])]
        np.testing.assert_allclose(sample.prompt.logprobs[1:], following, atol=2e-5)
        for i, top in enumerate(sample.prompt.top_logprobs[1:]):
            check_top(top, expected[i], 3)
        assert len(sample.top_logprobs) == len(sample.tokens)
        for i, top in enumerate(sample.top_logprobs):
            check_top(top, expected[len(context) - 1 + i], 3)
    assert all(sample.prompt is None and sample.top_logprobs is None for sample in samples[len(CONTEXTS) :])


def test_asking_for_the_likeliest_tokens_changes_no_draw(warm):
    alone = sample_requests(warm, [Request(CONTEXTS[2], SamplingParams(8), 5)])[0]
    asked = sample_requests(warm, [Request(CONTEXTS[2], SamplingParams(8, top_logprobs=MOST_TOP_LOGPROBS), 5)])[0]
    assert asked.tokens == alone.tokens and asked.logprobs == alone.logprobs
    assert {len(top) for top in asked.top_logprobs} == {MOST_TOP_LOGPROBS}


def test_stops_cut_the_likeliest_tokens_too(warm):
    whole = sample_requests(warm, [Request(CONTEXTS[1], SamplingParams(8, top_logprobs=2), 1)])[0]
    stop = whole.tokens[2]
    cut = sample_requests(warm, [Request(CONTEXTS[1], SamplingParams(8, top_logprobs=2, stop_ids=(stop,)), 1)])[0]
    assert cut.finish_reason == "stop"
    assert cut.top_logprobs == whole.top_logprobs[: len(cut.tokens)]


def test_a_preempted_request_has_the_scores_of_its_context(new_sampler, weights):
    sampler = new_sampler(slots=4, max_model_len=32, cache_tokens=48, page_size=4, prefill_shapes=((4, 8),))
    asked = SamplingParams(16, prompt_logprobs=True)
    contexts = [RNG.integers(1, CONFIG.vocab_size, 10).tolist() for _ in range(4)]
    samples = sample_requests(sampler, [Request(context, asked, i) for i, context in enumerate(contexts)])
    assert sampler.stats.preemptions > 0
    for context, sample in zip(contexts, samples, strict=True):
        expected = network_logprobs(weights, context)
        following = [expected[i, token] for i, token in enumerate(context[1:])]
        np.testing.assert_allclose(sample.prompt.logprobs[1:], following, atol=2e-5)


@pytest.mark.parametrize("sizes", [{}, {"data": 2, "expert": 2}], ids=str)
def test_a_row_that_all_shards_score_has_the_networks_log_probabilities(new_sampler, weights, sizes):
    sampler = new_sampler(sizes, prefill_shapes=((2, 4), (2, 8)))
    row = RNG.integers(1, CONFIG.vocab_size, 31).tolist()
    scores = sampler.score(row)
    assert scores.routing is None and scores.logprobs_BS.shape == (math.prod(sizes.values()), 30)
    expected = [network_logprobs(weights, row)[i, token] for i, token in enumerate(row[1:])]
    for logprobs in scores.logprobs_BS:
        np.testing.assert_allclose(logprobs, expected, atol=2e-5)


def test_a_row_that_is_scored_changes_no_bit_of_what_others_sample(new_sampler):
    """The cache is full: a request of the row's length would take pages from the conversations."""
    sampler = new_sampler(slots=2, max_model_len=32, page_size=4, prefill_shapes=((2, 8),))
    row = RNG.integers(1, CONFIG.vocab_size, 32).tolist()

    async def main(scores: bool):
        async with sampler.serving():
            sampler.reset_prefix_cache()
            sessions = [await sampler.open(seed) for seed in (1, 2)]
            samples, contexts = [], [PROMPTS[:8], PROMPTS[8:]]
            for _ in range(2):
                turn = [session.sample(c, SamplingParams(8)) for session, c in zip(sessions, contexts, strict=True)]
                samples += await asyncio.gather(*turn)
                contexts = [c + sample.tokens + [5] for c, sample in zip(contexts, samples[-2:], strict=True)]
                if scores:
                    await sampler.pause()
                    await asyncio.to_thread(sampler.score, row)
                    sampler.resume()
            for session in sessions:
                session.close()
            return [(sample.tokens, sample.logprobs, sample.cached) for sample in samples]

    alone = asyncio.run(main(False))
    assert asyncio.run(main(True)) == alone and min(cached for *_, cached in alone[2:]) > 0
    with pytest.raises(AssertionError, match="would mix with those of the row"):
        asyncio.run(score_while_serving(sampler, row))


async def score_while_serving(sampler, row):
    async with sampler.serving():
        sampler.score(row)


def test_more_likeliest_tokens_than_there_are_is_refused():
    with pytest.raises(UserError, match="top_logprobs=21 is not between 0 and 20"):
        SamplingParams(1, top_logprobs=21)
