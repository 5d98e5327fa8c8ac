"""A network whose layers all have a sliding window: the pages before it are freed, and no sample changes."""

import asyncio
import dataclasses

import jax
import pytest

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.models.cache import cache_window
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.sampler import config
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.request import Request
from composer_jax.sampler.sampler import Sampler
from tests.models.small import GROUPED_QUERY, random_weights, small
from tests.sampler.conversations import END, Branch, assert_logprobs_of_learner, assert_same, flat, run_all

WINDOW = 7
MODEL = small(
    **(GROUPED_QUERY | {"sliding_window": WINDOW, "full_attention_every": 3}),
    vocab_size=24,
    n_layers=2,
    n_mtp_modules=0,
)
SEEDS = list(range(100, 110))
LONG = {"turns": 3, "branches": 2, "longest": 12, "max_tokens": 9}


@pytest.fixture(scope="module")
def model_weights():
    return random_weights(MODEL)


@pytest.fixture(scope="module")
def new_windowed(model_weights):
    def make(model=MODEL, end_tokens=(END,), **changes) -> Sampler:
        fields = dict(slots=4, max_model_len=64, decode_steps=4, page_size=4, prefill_shapes=((4, 8),))
        mesh = make_mesh(jax.devices()[:1])
        sampler = Sampler(ModelDef(model), mesh, SamplerConfig(**(fields | changes)), end_tokens=end_tokens)
        sampler.update(*model_weights, version=3)
        return sampler

    return make


@pytest.fixture(scope="module")
def unfreed(new_windowed):
    """The same conversations with all pages kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "cache_window", lambda config: None)
        sampler = new_windowed()
    assert sampler.limits.window is None
    return run_all(sampler, SEEDS, **LONG)


@pytest.mark.parametrize(
    "changes", [{"cache_tokens": 32}, {"drafts": "prompt_lookup", "draft_tokens": 3}], ids=["small", "drafts"]
)
def test_freed_pages_change_no_sample(new_windowed, unfreed, model_weights, changes):
    """Also where four slots share a cache of half a context, so that pages are reused all the time."""
    sampler = new_windowed(**changes)
    freed = run_all(sampler, SEEDS, **LONG)
    assert_same(freed, unfreed)
    assert max(len(branch.tokens) for branch in flat(freed)) > 32
    assert_logprobs_of_learner(MODEL, model_weights, flat(freed))


def test_a_session_keeps_its_window_where_a_stop_cuts_what_was_computed_ahead(new_windowed, model_weights):
    """Two calls of four tokens may have gone beyond the token at which the message stops."""
    sampler = new_windowed(end_tokens=(), slots=2, cache_tokens=48)

    async def converse(seed):
        session, branch = await sampler.open(seed), Branch()
        for turn in range(4):
            stops = tuple(range((seed + turn) % 3, 24, 3))
            delta = [1 + seed, 2 + turn]
            branch.add(delta, await session.sample(branch.tokens + delta, SamplingParams(9, stop_ids=stops)))
        session.close()
        return branch

    async def main():
        async with sampler.serving():
            return await asyncio.gather(*(converse(seed) for seed in range(6)))

    assert_logprobs_of_learner(MODEL, model_weights, asyncio.run(asyncio.wait_for(main(), 120)))


def test_a_long_message_holds_the_pages_of_its_window(new_windowed):
    """A window of 7 tokens and a call of 8 lie in 5 pages of 4 tokens; the context has 16 pages."""
    sampler = new_windowed(end_tokens=())
    held = []

    async def main():
        async with sampler.serving():
            async for _ in sampler.submit(Request([1, 2, 3] * 9, SamplingParams(37))):
                held.append(sampler.stats.held_pages)

    asyncio.run(asyncio.wait_for(main(), 120))
    assert len(held) > 8 and max(held) <= sampler.limits.most_pages(64) == 5
    assert sampler.stats.held_pages == 0


def test_pages_are_kept_where_a_layer_attends_to_the_whole_context():
    assert cache_window(MODEL) == WINDOW
    assert cache_window(dataclasses.replace(MODEL, full_attention_every=2)) is None
    assert cache_window(dataclasses.replace(MODEL, sliding_window=None, full_attention_every=1)) is None
    assert cache_window(dataclasses.replace(MODEL, sliding_window=2)) == 3, "the embedding has two taps"


def test_a_cache_that_is_smaller_than_a_window_and_a_call_is_refused(new_windowed):
    with pytest.raises(
        UserError, match="16 tokens, less than the 20 that one context of sampler.max_model_len=64 takes"
    ):
        new_windowed(cache_tokens=16)
