"""What is cached changes no sample: common prefixes are computed once, and full caches make requests wait."""

import asyncio

from composer_jax.data.chat.sampling_params import SamplingParams
from tests.sampler.conversations import assert_same, run_all

SEEDS = list(range(100, 106))


def test_requests_that_give_way_come_back_without_loss(sampler, new_sampler):
    """The cache holds one full context for five slots."""
    long_messages = {"turns": 2, "branches": 1, "longest": 4, "max_tokens": 20}
    other = new_sampler(slots=5, page_size=4, cache_tokens=64)
    assert_same(run_all(other, SEEDS, **long_messages), run_all(sampler, SEEDS, **long_messages))
    assert other.stats.preemptions > 0


def test_a_turn_prefills_the_new_tokens_of_its_context(new_sampler):
    """A group's common prompt is prefilled once, in whole pages; the last token is computed by a decode call."""
    sampler = new_sampler(page_size=4)
    prompt, delta = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [3, 1, 4, 1, 5]

    async def main():
        async with sampler.serving():
            sessions = [await sampler.open(seed) for seed in range(4)]
            firsts = await asyncio.gather(*(s.sample(prompt, SamplingParams(7)) for s in sessions))
            group, places = sampler.prefilled_tokens, sampler.prefill_places
            second = await sessions[0].sample(prompt + firsts[0].tokens + delta, SamplingParams(3))
            turn = sampler.prefilled_tokens - group
            assert sampler.prefill_places - places == 8 * 8, "not one call of the only shape"
            branch = await sessions[0].sample(prompt + [9, 9, 9], SamplingParams(3), branch=1)
            for session in sessions:
                session.close()
            return group, turn, sampler.prefilled_tokens - group - turn, firsts, second, branch

    group, turn, branched, firsts, second, branch = asyncio.run(asyncio.wait_for(main(), 120))
    # 8 of the 10 tokens before the last are whole pages, which the other three find.
    assert group == 10 + 3 * 2 and [s.cached for s in firsts] == [0, 8, 8, 8]
    assert turn == len(delta) and second.cached == len(prompt) + len(firsts[0].tokens) - 1
    assert branched == 13 - 8 and branch.cached == 8
