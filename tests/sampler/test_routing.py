"""The experts that a sample reports are those that the network chooses for its tokens, in every layer."""

import asyncio
import dataclasses

import numpy as np
import pytest

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.sampler import drafts
from composer_jax.sampler.request import Request
from tests.compilations import compiles_nothing
from tests.models.routes import chosen_routes
from tests.models.small import LLAMA, random_weights, rows, small
from tests.sampler.conversations import sample_requests

CONFIG = small(vocab_size=24, n_dense_layers=0, dense_layers=(1,), n_mtp_modules=0)
"""Expert layers before and after one without."""
RECORDING = dataclasses.replace(CONFIG, cache_routing=True)
ASKED = SamplingParams(6, return_routing=True)
RNG = np.random.default_rng(11)


@pytest.fixture(scope="module")
def recorded_weights():
    return random_weights(CONFIG)


@pytest.fixture(scope="module")
def new_recorder(new_sampler, recorded_weights):
    def make(sizes=None):
        return new_sampler(sizes, RECORDING, recorded_weights, page_size=4, prefill_shapes=((4, 8),))

    return make


def chosen(weights, tokens: list[int], monkeypatch) -> np.ndarray:
    """The choices [tokens, layers, k] of the training form."""
    return chosen_routes(monkeypatch, CONFIG, weights, rows([[tokens]], 64))[0, : len(tokens)]


@pytest.mark.parametrize("sizes", [{}, {"data": 2, "expert": 2, "tensor": 2}], ids=str)
def test_routing_covers_prompt_shared_prefix_and_message(new_recorder, recorded_weights, monkeypatch, sizes):
    sampler = new_recorder(sizes)
    prefix = RNG.integers(1, CONFIG.vocab_size, 13).tolist()
    contexts = [prefix + RNG.integers(1, CONFIG.vocab_size, n).tolist() for n in (1, 4, 9)]
    sample_requests(sampler, [Request(prefix, SamplingParams(1))])
    samples = sample_requests(sampler, [Request(context, ASKED, i) for i, context in enumerate(contexts)])
    assert any(sample.cached for sample in samples), "no prefix was shared"
    for context, sample in zip(contexts, samples, strict=True):
        tokens = context + sample.tokens
        assert sample.routing.dtype == np.uint8 and sample.routing_start == 0
        np.testing.assert_array_equal(sample.routing, chosen(recorded_weights, tokens, monkeypatch)[:-1])


@pytest.mark.parametrize("sizes", [{}, {"data": 2, "expert": 2, "tensor": 2}], ids=str)
def test_routes_begin_where_they_are_asked_for_and_one_read_serves_all_that_end_together(
    new_recorder, recorded_weights, monkeypatch, sizes
):
    sampler = new_recorder(sizes)
    reads = []
    runner = sampler.engines[0].runner
    read = runner.start_routing
    monkeypatch.setattr(runner, "start_routing", lambda wanted: reads.append(len(wanted)) or read(wanted))
    prefix = RNG.integers(1, CONFIG.vocab_size, 13).tolist()
    sample_requests(sampler, [Request(prefix, SamplingParams(1))])
    contexts = [prefix + RNG.integers(1, CONFIG.vocab_size, 4).tolist() for _ in range(4)]
    starts = 0, 5, 16, 17
    asked = [dataclasses.replace(ASKED, routing_start=start) for start in starts]
    samples = sample_requests(
        sampler, [Request(context, params, i) for i, (context, params) in enumerate(zip(contexts, asked, strict=True))]
    )
    assert sum(reads) == 4 and len(reads) <= len({len(sample.tokens) for sample in samples})
    for context, sample, start in zip(contexts, samples, starts, strict=True):
        assert sample.routing_start == start
        expected = chosen(recorded_weights, context + sample.tokens, monkeypatch)[start:-1]
        np.testing.assert_array_equal(sample.routing, expected)


def test_a_start_beyond_the_context_is_refused():
    with pytest.raises(UserError, match="routing_start=3 is beyond the 2 tokens"):
        Request([1, 2], dataclasses.replace(ASKED, routing_start=3))
    with pytest.raises(UserError, match="negative"):
        SamplingParams(1, routing_start=-1)


def test_wrong_drafts_leave_no_routes(new_sampler, recorded_weights, monkeypatch):
    drafting = dict(drafts="prompt_lookup", draft_tokens=2, page_size=4, prefill_shapes=((4, 8),))
    monkeypatch.setattr(drafts._Speeds, "should_verify", lambda self: True)
    sampler = new_sampler(None, RECORDING, recorded_weights, **drafting)
    context = [*range(1, CONFIG.vocab_size), *range(1, 9)]  # every sampled token has been followed by another
    asked = SamplingParams(12, temperature=0.5, return_routing=True, routing_start=7)
    samples = sample_requests(sampler, [Request(context, asked, seed) for seed in range(4)])
    assert sum(sampler.stats.drafted) > sum(sampler.stats.accepted)
    for sample in samples:
        expected = chosen(recorded_weights, context + sample.tokens, monkeypatch)[7:-1]
        np.testing.assert_array_equal(sample.routing, expected)


def test_wrong_drafts_of_the_mtp_module_leave_no_routes(new_sampler, monkeypatch):
    model = dataclasses.replace(CONFIG, n_mtp_modules=1)
    weights = random_weights(model)
    drafting = dict(drafts="mtp", draft_tokens=2, page_size=4, prefill_shapes=((4, 8),))
    recording = dataclasses.replace(model, cache_routing=True, cache_mtp=True)
    sampler = new_sampler(None, recording, weights, **drafting)
    context = [3, 4, 5, 3, 4, 5, 3, 4]
    asked = SamplingParams(20, return_routing=True, routing_start=7)
    (sample,) = sample_requests(sampler, [Request(context, asked, 1)])
    assert sum(sampler.stats.drafted) > sum(sampler.stats.accepted)
    tokens = context + sample.tokens
    expected = chosen_routes(monkeypatch, model, weights, rows([[tokens]], 64))[0, : len(tokens)]
    np.testing.assert_array_equal(sample.routing, expected[7:-1])


def test_preempted_requests_have_all_their_routes(new_sampler, recorded_weights, monkeypatch):
    sizes = dict(slots=4, max_model_len=32, cache_tokens=48, page_size=4, prefill_shapes=((4, 8),))
    sampler = new_sampler(None, RECORDING, recorded_weights, **sizes)
    contexts = [RNG.integers(1, CONFIG.vocab_size, 10).tolist() for _ in range(4)]
    asked = [SamplingParams(16, return_routing=True, routing_start=start) for start in (0, 3, 8, 9)]
    requests = [Request(context, params, i) for i, (context, params) in enumerate(zip(contexts, asked, strict=True))]
    samples = sample_requests(sampler, requests)
    assert sampler.stats.preemptions > 0
    for context, params, sample in zip(contexts, asked, samples, strict=True):
        expected = chosen(recorded_weights, context + sample.tokens, monkeypatch)[params.routing_start : -1]
        np.testing.assert_array_equal(sample.routing, expected)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_after_new_weights_a_turn_brings_the_routes_of_its_new_tokens(
    new_recorder, recorded_weights, monkeypatch, mode
):
    """Those of the new weights where everything is computed again; with "keep" old tokens keep their routes."""
    sampler, other = new_recorder(), random_weights(CONFIG, 1)

    async def main():
        async with sampler.serving():
            session = await sampler.open(1)
            first = await session.sample([1, 2, 3, 4, 5], ASKED)
            await sampler.update_serving(*other, version=4, mode=mode)
            context = [1, 2, 3, 4, 5, *first.tokens, 6, 7]
            start = 4 + len(first.tokens)
            second = await session.sample(context, dataclasses.replace(ASKED, routing_start=start))
            whole = await session.sample([*context, *second.tokens], ASKED)
            session.close()
            return first, context, second, whole

    first, context, second, whole = asyncio.run(main())
    start = second.routing_start
    assert set(second.versions) == {4} and len(second.routing) == 2 + len(second.tokens)
    np.testing.assert_array_equal(whole.routing[start : start + len(second.routing)], second.routing)
    if mode == "keep":
        np.testing.assert_array_equal(whole.routing[:start], first.routing)
    else:
        expected = chosen(other, context + second.tokens, monkeypatch)[:-1]
        np.testing.assert_array_equal(second.routing, expected[start:])


def test_a_message_that_a_stop_cuts_has_the_routing_of_what_is_kept(new_recorder):
    sampler = new_recorder()
    context = RNG.integers(1, CONFIG.vocab_size, 5).tolist()
    whole = sample_requests(sampler, [Request(context, ASKED, 3)])[0]
    asked = dataclasses.replace(ASKED, stop_ids=(whole.tokens[1],))
    cut = sample_requests(sampler, [Request(context, asked, 3)])[0]
    assert len(cut.routing) == len(context) + len(cut.tokens) - 1
    np.testing.assert_array_equal(cut.routing, whole.routing[: len(cut.routing)])


def test_a_cache_without_routing_refuses_to_return_it(sampler):
    with pytest.raises(UserError, match=r"set model\.cache_routing=True"):
        sample_requests(sampler, [Request([1, 2], ASKED)])


def test_a_network_without_experts_has_no_routing():
    with pytest.raises(UserError, match="cache_routing"):
        small(**LLAMA, cache_routing=True)


def test_reading_routes_compiles_nothing_after_the_warm_up(new_recorder):
    sampler = new_recorder()
    sampler.warm_up()
    with compiles_nothing():
        for length in (3, 5, 11, 17):
            sample_requests(
                sampler, [Request([5] * length, SamplingParams(n, return_routing=True), n) for n in (2, 3, 7)]
            )
