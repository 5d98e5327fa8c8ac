"""The sampler on one device: exact log-probabilities, reproducible choices, no recompilation, no hanging."""

import asyncio
import itertools

import chex
import jax
import numpy as np
import pytest

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.observe.compilations import count_compilations
from composer_jax.observe.progress import Progress
from composer_jax.sampler import programs
from tests.compilations import compiles_nothing
from tests.models.small import forward, rows
from tests.sampler.conversations import (
    CONFIG,
    END,
    Branch,
    assert_logprobs_of_learner,
    assert_same,
    converse,
    flat,
    run_all,
)

SEEDS = list(range(100, 112))


@pytest.fixture(scope="module")
def conversations(sampler):
    """More conversations than slots."""
    return run_all(sampler, SEEDS)


def test_sampled_logprobs_are_those_of_the_learner(conversations, weights):
    branches = flat(conversations)
    assert len(branches) == 24 and max(len(b.tokens) for b in branches) > 30
    assert_logprobs_of_learner(CONFIG, weights, branches)


def test_tokens_follow_the_distribution_of_the_policy(sampler, weights):
    """The probability mass below each sampled token, plus a random share of its own, is uniform."""
    branches = flat(run_all(sampler, range(500, 530), turns=4, branches=1, longest=4, max_tokens=10))
    places = []
    rng = np.random.default_rng(0)
    for start in range(0, len(branches), 8):
        part = branches[start : start + 8]
        logits = forward(CONFIG)(*weights, rows([[b.tokens] for b in part], 64))["logits"]
        probabilities = np.exp(np.asarray(logits, np.float64))
        probabilities /= probabilities.sum(-1, keepdims=True)
        for row, branch in enumerate(part):
            for t in np.flatnonzero(~np.isnan(branch.logprobs)):
                p, token = probabilities[row, t - 1], branch.tokens[t]
                places.append(p[:token].sum() + rng.random() * p[token])
    counts = np.histogram(places, bins=10, range=(0, 1))[0]
    assert len(places) > 800
    expected = len(places) / 10
    assert ((counts - expected) ** 2 / expected).sum() < 9 + 5 * np.sqrt(18)


def test_a_conversation_does_not_depend_on_the_others_or_on_its_pages(sampler, conversations):
    assert_same([run_all(sampler, [seed])[0] for seed in SEEDS[:2]], conversations[:2])
    assert_same(run_all(sampler, SEEDS[::-1])[::-1], conversations)


def test_a_conversation_does_not_depend_on_how_calls_are_cut(new_sampler, conversations):
    """Neither on the tokens of a decode call, nor on the shapes, nor on the part of the cache that is read."""
    other = new_sampler(slots=5, decode_steps=3, prefill_shapes=((3, 5),), page_size=5)
    assert_same(run_all(other, SEEDS[:6]), conversations[:6])


def test_another_seed_and_another_branch_draw_other_tokens(sampler):
    async def first_tokens(session):
        return (await session.sample([5, 6, 7], SamplingParams(12))).tokens

    async def main():
        async with sampler.serving():
            one, again, other = [await sampler.open(seed) for seed in (1, 1, 2)]
            drawn = [await first_tokens(session) for session in (one, again, other)]
            drawn.append((await one.sample([5, 6, 7], SamplingParams(12), branch=1)).tokens)
            for session in (one, again, other):
                session.close()
            return drawn

    one, again, other, branch = asyncio.run(main())
    assert one == again
    assert one != other and one != branch


def test_warming_up_compiles_every_shape_and_changes_nothing(
    new_sampler, weights, conversations, nothing_shared, monkeypatch
):
    """Afterwards nothing is traced or compiled, for any conversation and for new weights."""
    for name, traces in {"prefill": 2, "decode": 2}.items():
        monkeypatch.setattr(programs, name, chex.assert_max_traces(getattr(programs, name), n=traces))
    fresh = new_sampler(prefill_shapes=((8, 4), (2, 8)), decode_rows=(2,))
    done, before = [], count_compilations()
    monkeypatch.setattr(Progress, "update", lambda self, n: done.append(count_compilations()))
    assert fresh.warm_up() == len(done) == 6  # two of each kind: prefill, decode, writes of page tables
    assert all(later > earlier for earlier, later in zip([before, *done], done, strict=False))
    fresh.update(*weights, version=3)
    with compiles_nothing():
        assert_same(run_all(fresh, SEEDS), conversations)
        run_all(fresh, range(30, 50), turns=4, branches=3, longest=12, max_tokens=3)
        run_all(fresh, range(3), turns=1)
        fresh.update(*weights, version=4)


def test_a_message_stops_at_the_end_token_or_at_its_budget(sampler):
    async def main():
        async with sampler.serving():
            session = await sampler.open(9)
            samples, context = [], []
            for number in range(40):
                context += [3, 4]
                samples.append(await session.sample(context, SamplingParams(9), branch=number))
                context = [] if len(context) > 30 else context + samples[-1].tokens
            session.close()
            return samples

    samples = asyncio.run(main())
    assert {s.finish_reason for s in samples} == {"stop", "length"}
    for s in samples:
        assert len(s.tokens) == len(s.logprobs) == len(s.versions)
        assert set(s.versions) == {3}
        assert END not in s.tokens[:-1]
        assert (s.finish_reason == "stop") == (s.tokens[-1] == END)
        assert s.finish_reason == "stop" or len(s.tokens) == 9


def test_the_context_goes_on_after_an_end_token(sampler, weights):
    """The end token is part of the context: what follows is conditioned on it."""
    for seed in range(30):
        branches = run_all(sampler, [seed], turns=4, branches=1, longest=2, max_tokens=8)[0]
        inside = [t for t in range(len(branches[0].tokens) - 1) if branches[0].tokens[t] == END]
        if any(not np.isnan(branches[0].logprobs[t]) for t in inside):
            break
    assert_logprobs_of_learner(CONFIG, weights, branches)


def test_a_new_version_of_the_weights_is_used_and_recorded(sampler, weights, new_sampler):
    other = jax.tree.map(lambda w: 1.3 * w, weights[0]), weights[1]

    async def main():
        async with sampler.serving():
            session = await sampler.open(4)
            first = await session.sample([1, 2, 3], SamplingParams(6))
            await sampler.update_serving(*other, version=4)
            second = await session.sample([1, 2, 3], SamplingParams(6), branch=1)
            session.close()
            return first, second

    try:
        first, second = asyncio.run(main())
    finally:
        sampler.update(*weights, version=3)
    assert set(first.versions) == {3} and set(second.versions) == {4}
    assert_logprobs_of_learner(CONFIG, other, [branch_of([1, 2, 3], second)])


def test_the_installed_weights_are_a_copy(new_sampler, weights):
    """A learner donates its parameters to the next step; the sampler must not notice."""
    sampler = new_sampler()
    mine = jax.tree.map(lambda w: w + 0, weights)
    sampler.update(*mine, version=5)
    jax.tree.map(lambda w: w.delete(), mine)
    assert run_all(sampler, [1])


# -- what a session refuses ---------------------------------------------------------------------------------------


def test_a_context_is_filled_up_to_its_capacity(sampler, weights):
    async def main():
        async with sampler.serving():
            session = await sampler.open(0)
            try:
                return await fill(session)
            finally:
                session.close()

    async def fill(session):
        assert session.max_model_len == 64
        first = await session.sample([1] * 60, SamplingParams(100))
        assert len(first.tokens) <= 4
        last = await session.sample([2] * 63, SamplingParams(5))
        assert len(last.tokens) == 1
        with pytest.raises(ValueError, match="65 tokens leave no room in a context of 64"):
            await session.sample([2] * 63 + last.tokens + [1], SamplingParams(1))
        with pytest.raises(ValueError, match="64 tokens leave no room"):
            await session.sample([1] * 64, SamplingParams(1))
        with pytest.raises(ValueError, match="empty"):
            await session.sample([], SamplingParams(3))
        # A refused call has changed nothing.
        again = await session.sample([2] * 63, SamplingParams(5))
        return last, again

    last, again = asyncio.run(asyncio.wait_for(main(), 120))
    assert_logprobs_of_learner(CONFIG, weights, [branch_of([2] * 63, s) for s in (last, again)])


def branch_of(delta, sample) -> Branch:
    branch = Branch()
    branch.add(delta, sample)
    return branch


def test_a_closed_session_refuses_and_gives_its_slot_back_once(sampler):
    async def main():
        async with sampler.serving():
            session = await sampler.open(0)
            session.close()
            session.close()
            with pytest.raises(RuntimeError, match="closed"):
                await session.sample([1], SamplingParams(1))
            sessions = [await sampler.open(seed) for seed in range(sampler.config.slots)]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(sampler.open(99), 0.05)
            for session in sessions:
                session.close()

    asyncio.run(main())


def test_sizes_that_do_not_fit_are_refused(new_sampler):
    with pytest.raises(UserError, match="max_model_len of 65 tokens exceeds.*64"):
        new_sampler(max_model_len=65)
    with pytest.raises(UserError, match="6 sampler slots do not divide over 4 devices; use a multiple of 4"):
        new_sampler({"data": 4}, slots=6)


def test_serving_without_weights_raises(new_sampler):
    sampler = new_sampler()
    sampler.release()

    async def main():
        async with sampler.serving():
            pass

    with pytest.raises(RuntimeError, match="update before serving"):
        asyncio.run(main())


# -- when things go wrong -----------------------------------------------------------------------------------------


class Broken(Exception):
    pass


@pytest.mark.parametrize("call", ["start_prefill", "start_decode"])
def test_a_failing_device_call_raises_in_every_session(sampler, monkeypatch, call):
    """Twelve conversations on eight slots: some sample, some wait for a slot, some come back later.

    The runner is private; nothing public can make a device call fail.
    """
    calls, works = itertools.count(), getattr(sampler.engines[0].runner, call)

    def failing(*args, **options):
        if next(calls) == 3:
            raise Broken
        return works(*args, **options)

    monkeypatch.setattr(sampler.engines[0].runner, call, failing)
    outcomes = []

    async def one(seed):
        try:
            await converse(sampler, seed, turns=50, branches=1, longest=1, max_tokens=1)
        except Exception as error:
            outcomes.append(error)
            raise

    async def main():
        async with sampler.serving():
            await asyncio.gather(*(one(seed) for seed in range(12)), return_exceptions=True)

    with pytest.raises(Broken):
        asyncio.run(asyncio.wait_for(main(), 120))
    assert len(outcomes) == 12
    assert all(isinstance(error, Broken) for error in outcomes)


def test_a_sampler_serves_again_after_a_failure(sampler, monkeypatch, conversations):
    def failing(*args):
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(sampler.engines[0].runner, "start_decode", failing)
        with pytest.raises(Broken):
            run_all(sampler, SEEDS[:3])
    assert_same(run_all(sampler, SEEDS[:4]), conversations[:4])


def test_a_cancelled_conversation_leaves_its_slot_clean(sampler, conversations):
    """Its pages go to someone else while the device may still be working on them."""

    async def main():
        async with sampler.serving():
            for wait in (0, 0.001, 0.01, 0.02):
                doomed = [asyncio.create_task(converse(sampler, 900 + i)) for i in range(8)]
                await asyncio.sleep(wait)
                for task in doomed:
                    task.cancel()
                await asyncio.gather(*doomed, return_exceptions=True)
                replayed = await asyncio.gather(*(converse(sampler, seed) for seed in SEEDS[:8]))
                assert_same(replayed, conversations[:8])

    asyncio.run(asyncio.wait_for(main(), 300))


def test_leaving_in_the_middle_of_a_call_does_not_disturb_the_next_serving(sampler, conversations):
    async def leave():
        async with sampler.serving():
            running = [asyncio.create_task(converse(sampler, 900 + i)) for i in range(8)]
            await asyncio.sleep(0.005)
            for task in running:
                task.cancel()

    for _ in range(3):
        asyncio.run(leave())
        assert_same(run_all(sampler, SEEDS[:2]), conversations[:2])


def test_requests_that_are_pending_when_serving_ends_raise(sampler):
    """Requests to sample as well as requests for a slot."""

    async def long_winded() -> int:
        """A seed whose answer takes several decode calls, so that it cannot be complete when the serving ends."""
        for seed in range(100):
            session = await sampler.open(seed)
            sample = await session.sample([1, 2], SamplingParams(50))
            session.close()
            if len(sample.tokens) > 3 * sampler.config.decode_steps:
                return seed
        raise AssertionError("every answer is short")

    async def main():
        async with sampler.serving():
            seed = await long_winded()
        async with sampler.serving():
            sessions = [await sampler.open(seed + i) for i in range(8)]
            late = [
                asyncio.create_task(sessions[0].sample([1, 2], SamplingParams(50))),
                asyncio.create_task(sampler.open(9)),
            ]
            await asyncio.sleep(0)
        late.append(asyncio.create_task(sessions[1].sample([1], SamplingParams(1))))
        return await asyncio.gather(*late, return_exceptions=True)

    for outcome in asyncio.run(asyncio.wait_for(main(), 60)):
        assert isinstance(outcome, RuntimeError) and "stopped serving" in str(outcome)
