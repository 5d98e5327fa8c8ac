"""The experts that a sample reports are those that the network chooses for its tokens, in every layer."""

import dataclasses

import numpy as np
import pytest

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
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
        assert sample.routing.dtype == np.int16
        np.testing.assert_array_equal(sample.routing, chosen(recorded_weights, tokens, monkeypatch)[:-1])


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
