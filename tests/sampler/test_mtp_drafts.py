"""The MTP module drafts: the tokens stay the same, and as many drafts are right as its training form says."""

import dataclasses

import numpy as np
import pytest

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.observe.compilations import count_compilations
from composer_jax.sampler import drafts
from composer_jax.sampler.request import Request
from tests.models.small import GROUPED_QUERY, forward, random_weights, rows, small
from tests.sampler.conversations import CONFIG, END, assert_same, run_all, sample_requests
from tests.sampler.test_requests import PARAMS, sample_all

MODEL = small(vocab_size=24, n_layers=2, n_mtp_modules=1)
GROUPED = small(vocab_size=24, n_layers=2, n_mtp_modules=1, **GROUPED_QUERY)
SEEDS = list(range(300, 306))
STEPS, MOST = 5, 20
RNG = np.random.default_rng(4)
PROMPTS = [RNG.integers(1, 24, n).tolist() for n in RNG.integers(2, 14, 12)]


@pytest.fixture(scope="module")
def mtp_weights():
    return random_weights(MODEL)


@pytest.fixture(scope="module")
def pair(new_sampler, mtp_weights):
    """Samplers of one network, without drafts and with them."""
    plain = new_sampler(model=MODEL, weights=mtp_weights)
    fields = dict(drafts="mtp", draft_tokens=3, decode_steps=STEPS)
    drafting = new_sampler(model=MODEL, weights=mtp_weights, **fields)
    drafting.warm_up(processed=True)
    return plain, drafting


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Every call drafts."""
    monkeypatch.setattr(drafts._Speeds, "should_verify", lambda self: True)


def test_the_tokens_are_those_of_plain_decoding(pair):
    plain, drafting = pair
    compiled = count_compilations()
    assert_same(run_all(drafting, SEEDS, max_tokens=17), run_all(plain, SEEDS, max_tokens=17))
    programs = len(plain.engines[0].runner.warm_up_calls(processed=False))
    assert count_compilations() - compiled <= programs, "the drafting sampler compiled after its warm-up"
    stats = drafting.stats
    assert stats.drafted[0] > 100 and stats.accepted[0] > 0
    assert np.all(np.diff(stats.drafted) <= 0) and np.all(np.diff(stats.accepted) <= 0)


def test_requests_of_all_parameters_draft(pair):
    for params in PARAMS:
        plain, drafting = (sample_all(sampler, [params])[0] for sampler in pair)
        assert drafting.tokens == plain.tokens and drafting.finish_reason == plain.finish_reason, params
        np.testing.assert_allclose(drafting.logprobs, plain.logprobs, atol=2e-5)


def test_meshes_draft_alike(new_sampler, mtp_weights, pair):
    sizes = {"data": 2, "expert": 2, "tensor": 2}
    fields = dict(drafts="mtp", draft_tokens=3, decode_steps=STEPS, prefill_shapes=((2, 8),))
    sharded = new_sampler(sizes, dataclasses.replace(MODEL, dispatch="ring"), mtp_weights, **fields)
    before = sharded.stats.accepted
    assert_same(run_all(sharded, SEEDS[:3]), run_all(pair[0], SEEDS[:3]))
    assert sum(sharded.stats.accepted) > sum(before)


@pytest.mark.parametrize(
    "model", [MODEL, pytest.param(GROUPED, marks=pytest.mark.slow)], ids=["latent", "grouped_query"]
)
def test_as_many_drafts_are_right_as_the_training_form_says(new_sampler, model):
    """Also of requests that are preempted. Drafts of one token follow from what the network computed, and no draft
    reaches beyond the pages of its call."""
    weights = random_weights(model)
    fields = dict(drafts="mtp", draft_tokens=1, decode_steps=STEPS, page_size=4, cache_tokens=64)
    sampler = new_sampler(model=model, weights=weights, **fields)
    params = SamplingParams(MOST, temperature=0)
    samples = sample_requests(sampler, [Request(prompt, params) for prompt in PROMPTS])
    assert sampler.stats.preemptions > 0
    batch = rows([[prompt + sample.tokens] for prompt, sample in zip(PROMPTS, samples, strict=True)], 64)
    guesses = np.asarray(forward(model)(*weights, batch)["mtp_logits"])[0].argmax(-1)
    counts = [
        count_drafts(prompt + sample.tokens, len(prompt), guess)
        for prompt, sample, guess in zip(PROMPTS, samples, guesses, strict=True)
    ]
    drafted, accepted = np.sum(counts, axis=0)
    assert (sampler.stats.drafted, sampler.stats.accepted) == ((drafted,), (accepted,))
    assert 0 < accepted < drafted


def count_drafts(tokens: list[int], first: int, guess: np.ndarray) -> tuple[int, int]:
    """How many drafts of one token are verified, and how many are right, in a message that begins at `first`.

    guess: int [S], the module's guess at position i of token i+2. The first pass has no draft.
    """
    drafted = accepted = 0
    at, remaining, has_draft = first, MOST, False
    while at < len(tokens):
        call = min(STEPS, remaining)
        while call and at < len(tokens):
            n = 1
            if has_draft and call > 1:
                drafted += 1
                if guess[at - 2] == tokens[at]:
                    accepted += 1
                    n += tokens[at] != END
            at, call, remaining, has_draft = at + n, call - n, remaining - n, True
    return drafted, accepted


def test_a_network_without_modules_cannot_draft(new_sampler):
    with pytest.raises(UserError, match='drafts="mtp" needs a network with an MTP module'):
        new_sampler(model=CONFIG, drafts="mtp", draft_tokens=3)
