"""A sampler with two engines, each of which has one copy of the weights: what one engine samples, by a router."""

import asyncio
import contextlib
import dataclasses
import gc
import threading
import weakref

import jax
import numpy as np
import pytest

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.sampler.request import Request
from composer_jax.sampler.sampler import Sampler
from composer_jax.sampler.sequence import token_array
from tests.compilations import compiles_nothing
from tests.sampler.conversations import (
    CONFIG,
    Branch,
    assert_logprobs_of_learner,
    assert_same,
    flat,
    learner_logprobs,
    run_all,
    sample_requests,
)

SEEDS = list(range(400, 414))
"""Of more conversations than the eight slots."""
PROMPT = [3, 9, 14, 2, 7, 11, 5, 8, 1]
TOKENS = 40


@pytest.fixture(scope="module")
def one(new_sampler):
    """One engine of the size of each of the two."""
    sampler = new_sampler(slots=4, model=dataclasses.replace(CONFIG, cache_routing=True))
    sampler.warm_up(processed=True)
    return sampler


@pytest.fixture(scope="module")
def two(new_sampler):
    sampler = new_sampler({"replica": 2}, model=dataclasses.replace(CONFIG, cache_routing=True))
    assert len(sampler.engines) == 2 and [engine.limits.shards for engine in sampler.engines] == [1, 1]
    sampler.warm_up(processed=True)
    return sampler


@pytest.fixture(scope="module")
def endless(two, weights):
    """Two engines whose messages end at their budgets."""
    sampler = Sampler(two.definition, two.mesh, two.config, end_tokens=())
    sampler.update(*weights, version=3)
    sampler.warm_up()
    return sampler


@pytest.fixture(scope="module")
def other(weights):
    return jax.tree.map(lambda w: 1.2 * w, weights[0]), weights[1]


def serve(sampler, main):
    async def serving():
        async with sampler.serving():
            return await main()

    return asyncio.run(asyncio.wait_for(serving(), 120))


def test_each_engine_compiles_programs_of_its_own(one, two):
    assert two.warm_up(processed=True) == 2 * one.warm_up(processed=True)


def decoded(sampler) -> list[int]:
    return [engine.decoded_tokens for engine in sampler.engines]


# -- the tokens are those of one engine -------------------------------------------------------------------------------


def test_two_engines_give_token_for_token_the_conversations_of_one(one, two, weights):
    expected, before = run_all(one, SEEDS), decoded(two)
    with compiles_nothing():
        actual = run_all(two, SEEDS)
    assert_same(actual, expected)
    assert_logprobs_of_learner(CONFIG, weights, flat(actual)[:4])
    shares = np.subtract(decoded(two), before) / sum(len(b.tokens) for b in flat(actual))
    assert (shares > 0.1).all(), "both engines have sampled"


def test_greedy_seeded_stopped_and_routed_requests_are_those_of_one_engine(one, two):
    """Requests of a shared prefix that come at once, twice, so that the second time it is cached."""
    kinds = [
        SamplingParams(12, temperature=0.0),
        SamplingParams(12),
        SamplingParams(12, temperature=0.7, top_k=5, top_p=0.9, top_logprobs=2),
        SamplingParams(12, stop_ids=tuple(range(1, 12))),
        SamplingParams(6, prompt_logprobs=True, return_routing=True),
    ]
    requests = [Request([*PROMPT, *PROMPT, i], kinds[i % len(kinds)], i) for i in range(20)]
    for _ in range(2):
        for mine, theirs in zip(sample_requests(two, requests), sample_requests(one, requests), strict=True):
            assert (mine.tokens, mine.finish_reason) == (theirs.tokens, theirs.finish_reason)
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=2e-5)
            if theirs.routing is not None:
                np.testing.assert_array_equal(mine.routing, theirs.routing)
                np.testing.assert_allclose(mine.prompt.logprobs[1:], theirs.prompt.logprobs[1:], atol=2e-5)
    assert {sample.finish_reason for sample in sample_requests(two, requests)} >= {"stop", "length"}


def test_eight_bit_weights_are_those_of_one_engine(new_sampler):
    samplers = [new_sampler(sizes, slots=8, param_dtype="int8") for sizes in ({}, {"replica": 2})]
    alone, together = (run_all(sampler, SEEDS[:6], branches=1) for sampler in samplers)
    assert_same(together, alone)
    assert samplers[0].checksums == samplers[1].checksums


def test_both_engines_compute_at_the_same_time(endless, monkeypatch):
    """A call of each engine ends only after one of the other has started."""
    both = threading.Barrier(2)
    for engine in endless.engines:
        works, waits = engine.runner.start_decode, iter([True])

        def start(*args, works=works, waits=waits):
            finish = works(*args)
            return lambda: [both.wait(20) if next(waits, False) else None, finish()][1]

        monkeypatch.setattr(engine.runner, "start_decode", start)

    async def main():
        sessions = [await endless.open(seed) for seed in range(2)]
        samples = await asyncio.gather(*(session.sample(PROMPT, SamplingParams(9)) for session in sessions))
        for session in sessions:
            session.close()
        return samples

    assert [len(sample.tokens) for sample in serve(endless, main)] == [9, 9]


# -- who goes where ---------------------------------------------------------------------------------------------------


def test_a_session_opens_on_the_engine_with_the_fewest_and_stays_where_its_prefix_is(two):
    async def main():
        loads = lambda: [engine.gate.n_open for engine in two.engines]  # noqa: E731
        sessions = [await two.open(seed) for seed in range(4)]
        assert loads() == [2, 2]
        first, second, third, fourth = sessions  # on engines 0, 1, 0, 1
        for session in (second, fourth):
            session.close()
        later = [await two.open(seed) for seed in (5, 6)]
        assert loads() == [2, 2], "both on the engine that has become empty"
        before, context = decoded(two), list(PROMPT)
        for turn in range(3):
            sample = await first.sample(context, SamplingParams(7))
            assert sample.cached == (0 if turn == 0 else len(context) - 3), (
                "all but the tool's answer and the last token"
            )
            context += [*sample.tokens, 4, 6]
        assert decoded(two)[0] > before[0] and decoded(two)[1] == before[1]
        for session in (first, third, *later):
            session.close()

    two.reset_prefix_cache()
    serve(two, main)


def test_a_request_goes_to_the_engine_that_has_its_prefix_unless_that_one_has_far_more_to_do(two):
    prompt = [7, 7, 7, 3, 3, 3, 5, 5, 5, 2, 2, 2, 9, 9, 9, 4, 4]

    async def main():
        await two.submit(Request(prompt, SamplingParams(2)))
        first = int(np.argmax([engine.n_cached(token_array(prompt)) for engine in two.engines]))
        before = decoded(two)
        samples = [await two.submit(Request([*prompt, i], SamplingParams(2))) for i in range(3)]
        assert [sample.cached for sample in samples] == [16] * 3
        assert decoded(two)[1 - first] == before[1 - first]
        handles = [two.submit(Request([*prompt, i], SamplingParams(2))) for i in range(16)]
        loads = [engine.load for engine in two.engines]
        assert sum(loads) == 16 and max(loads) <= 2 * min(loads) + 1, loads
        await asyncio.gather(*handles)

    two.reset_prefix_cache()
    serve(two, main)


@pytest.mark.parametrize("most_sessions", [None, 3])
def test_nobody_waits_while_an_engine_has_room(two, weights, most_sessions):
    """`only_fitting`, so that eight sessions open: four on each engine."""
    options = {"most_sessions": most_sessions, "only_fitting": True}
    sampler = Sampler(two.definition, two.mesh, two.config, end_tokens=(), **options)
    n = most_sessions or 8

    async def main():
        tasks = [asyncio.create_task(sampler.open(seed)) for seed in range(n + 3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [task.done() for task in tasks] == [True] * n + [False] * 3
        tasks[n].cancel()
        last = [task.result() for task in tasks[:n]]
        for closed, opened in ((n - 1, n + 1), (n - 2, n + 2)):  # of either engine, one after the other
            last[closed].close()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert tasks[opened].done()
        for session in (*last, *(task.result() for task in tasks[n + 1 :])):
            session.close()
        assert [engine.gate.n_open for engine in sampler.engines] == [0, 0]

    sampler.update(*weights, version=1)
    serve(sampler, main)


def test_a_cancelled_request_frees_its_engine(endless):
    async def main():
        session = await endless.open(1)
        stream = session.stream(PROMPT, SamplingParams(TOKENS))
        await anext(stream)
        assert endless.stats.running == 1
        await stream.aclose()
        session.close()
        while endless.stats.held_pages:
            await asyncio.sleep(0.01)
        assert [engine.load for engine in endless.engines] == [0, 0]

    serve(endless, main)


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["recompute", "keep", "drain"])
def test_new_weights_reach_both_engines_at_one_time(endless, weights, other, mode):
    async def main():
        sessions = [await endless.open(seed) for seed in range(4)]
        long, short = SamplingParams(TOKENS), SamplingParams(TOKENS - 8)
        await endless.pause()
        running = [asyncio.create_task(s.sample(PROMPT, p)) for s, p in zip(sessions[:2], (long, short), strict=True)]
        while endless.stats.waiting < 2:
            await asyncio.sleep(0)
        endless.resume()  # both begin at the same time
        while min(engine.decoded_tokens - n for engine, n in zip(endless.engines, before, strict=True)) < 5:
            await asyncio.sleep(0)
        update = asyncio.create_task(endless.update_serving(*other, version=4, mode=mode))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another update is waiting"):
            await endless.update_serving(*other, version=5)
        late = [asyncio.create_task(session.sample(PROMPT, short)) for session in sessions[2:]]
        await update
        assert [engine.version for engine in endless.engines] == [4, 4] == [endless.version] * 2
        samples = [await task for task in (*running, *late)]
        for session in sessions:
            session.close()
        return samples

    endless.update(*weights, version=3)
    before = decoded(endless)
    *running, third, fourth = serve(endless, main)
    for sample in running:
        n = sample.versions.count(3)
        assert sample.versions == [3] * n + [4] * (len(sample.tokens) - n)
        assert (n == len(sample.tokens)) == (mode == "drain") and n > 0
    for sample in (third, fourth):
        assert set(sample.versions) == {4}
        (expected,) = learner_logprobs(CONFIG, other, [Branch(PROMPT + sample.tokens)], 64)
        np.testing.assert_allclose(sample.logprobs, expected[len(PROMPT) :], atol=1e-4)


def test_a_pause_does_not_wait_for_an_update_that_waits_for_messages_of_the_other_engine(endless, weights, other):
    async def main():
        session = await endless.open(1)
        running = asyncio.create_task(session.sample(PROMPT, SamplingParams(TOKENS)))
        while endless.stats.running < 1:
            await asyncio.sleep(0)
        update = asyncio.create_task(endless.update_serving(*other, version=4, mode="drain"))
        for _ in range(5):
            await asyncio.sleep(0)  # the idle engine rests
        await endless.pause()
        assert not update.done() and endless.version == 3
        endless.resume()
        await update
        assert set((await running).versions) == {3} and endless.version == 4
        session.close()

    endless.update(*weights, version=3)
    serve(endless, main)


def test_weights_of_another_network_leave_the_old_ones_in_both(endless, weights):
    async def main():
        with pytest.raises(ValueError):
            await endless.update_serving({}, {}, version=9)
        sessions = [await endless.open(seed) for seed in range(2)]
        samples = [await session.sample(PROMPT, SamplingParams(3)) for session in sessions]
        for session in sessions:
            session.close()
        return samples

    endless.update(*weights, version=3)
    assert [set(sample.versions) for sample in serve(endless, main)] == [{3}, {3}]


def test_where_one_engine_refuses_weights_that_another_has_none_are_left(endless, weights, other, monkeypatch):
    def refuse(*_, **__):
        raise UserError("bits differ")

    async def main():
        await endless.update_serving(*other, version=5)

    endless.update(*weights, version=3)
    with monkeypatch.context() as patch:
        patch.setattr(endless.engines[1].runner, "install", refuse)
        with pytest.raises(UserError, match="bits differ"):
            endless.update(*other, version=4)
        assert endless.version == -1 and endless.checksums == ()
    endless.update(*weights, version=3)
    with monkeypatch.context() as patch:
        patch.setattr(endless.engines[1].runner, "install", refuse)
        with pytest.raises(UserError, match="bits differ"):
            serve(endless, main)
        assert endless.version == -1
    endless.update(*weights, version=3)
    assert run_all(endless, SEEDS[:2], turns=1)


def test_an_update_makes_no_copy_of_arrays_that_it_may_share(two, weights):
    shared = Sampler(two.definition, two.mesh, two.config, end_tokens=())
    params, bias = jax.device_put(weights, two.definition.shardings(two.mesh))
    shared.update(params, bias, version=1, copy=False)
    for number, engine in enumerate(shared.engines):
        ours, theirs = (jax.tree.leaves(one)[0] for one in (engine.runner._weights, params))
        pointers = [shard.data.unsafe_buffer_pointer() for shard in theirs.addressable_shards]
        assert ours.addressable_shards[0].data.unsafe_buffer_pointer() == pointers[number]


# -- together ---------------------------------------------------------------------------------------------------------


def test_a_pause_stops_both_engines_and_both_score_the_fixed_row(endless, one):
    async def main():
        sessions = [await endless.open(seed) for seed in range(2)]
        running = [asyncio.create_task(session.sample(PROMPT, SamplingParams(TOKENS))) for session in sessions]
        while endless.stats.running < 2:
            await asyncio.sleep(0)
        await endless.pause()
        assert endless.is_paused and not any(engine._calls for engine in endless.engines)
        scores = endless.score(PROMPT)
        endless.resume()
        for task in running:
            await task
        for session in sessions:
            session.close()
        return scores

    scores = serve(endless, main)
    assert scores.logprobs_BS.shape == (2, len(PROMPT) - 1)
    np.testing.assert_allclose(scores.logprobs_BS[0], scores.logprobs_BS[1], atol=1e-6)
    assert scores.routing is not None and scores.routing.shape[0] == len(PROMPT) - 1


def test_a_failure_of_one_engine_ends_the_sessions_of_both_and_the_sampler_serves_again(endless, monkeypatch):
    errors = []

    async def one_session(seed):
        session = await endless.open(seed)
        try:
            await session.sample(PROMPT, SamplingParams(TOKENS))
        except Exception as error:
            errors.append(error)
        finally:
            session.close()

    async def main():
        await asyncio.gather(*(one_session(seed) for seed in range(4)))
        with pytest.raises(ZeroDivisionError):
            await endless.open(5)
        assert isinstance(endless.error, ZeroDivisionError)

    with monkeypatch.context() as patch:
        patch.setattr(endless.engines[1].runner, "start_decode", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            serve(endless, main)
    assert len(errors) == 4 and all(isinstance(error, ZeroDivisionError) for error in errors)
    assert run_all(endless, SEEDS[:3], turns=1)


def test_numbers_are_those_of_both_engines(endless, two):
    stats = [engine.stats for engine in endless.engines]
    assert endless.stats.pages == stats[0].pages + stats[1].pages == 64
    assert endless.decoded_tokens == sum(decoded(endless))
    assert endless.limits.shards == 2 and endless.limits.rows == 4


def test_an_update_that_follows_another_at_once_is_installed(two, weights):
    """A task that tries again as soon as it may comes before the engines that rest have gone on."""

    async def retry():
        while two.version < 8:
            with contextlib.suppress(RuntimeError):
                await two.update_serving(*weights, 8)
            await asyncio.sleep(0)

    async def main():
        waiting = asyncio.create_task(retry())
        await two.update_serving(*weights, 7)
        await waiting
        assert len((await two.submit(Request([1, 2], SamplingParams(2)))).tokens) == 2

    serve(two, main)
    assert two.version == 8


def test_a_pause_that_is_ended_before_it_begins_pauses_nothing(two):
    async def main():
        pausing = asyncio.create_task(two.pause())
        await asyncio.sleep(0)
        two.resume()
        await pausing
        assert not two.is_paused

    serve(two, main)


def test_a_serving_that_ends_takes_no_update(two, weights, monkeypatch):
    refused = []

    async def main():
        stop = two.engines[0].stop

        async def stop_late():
            with pytest.raises(RuntimeError, match="stopped"):
                await two.update_serving(*weights, 99)
            refused.append(99)
            await stop()

        monkeypatch.setattr(two.engines[0], "stop", stop_late)

    serve(two, main)
    assert refused == [99] and two.version != 99


def test_weights_that_were_given_are_not_kept(two, weights):
    """The sampler has its own copy, or refuses them."""

    async def main():
        for version, checksums in ((21, None), (22, ())):
            given = jax.tree.map(lambda x: x + 0, weights)
            leaf = weakref.ref(jax.tree.leaves(given)[0])
            with contextlib.nullcontext() if checksums is None else pytest.raises(UserError):
                await two.update_serving(*given, version, checksums=checksums)
            del given
            for _ in range(100):
                await asyncio.sleep(0.01)  # callbacks that brought the error end
                gc.collect()
                if leaf() is None:
                    break
            assert leaf() is None

    serve(two, main)


def test_token_ids_beyond_int32_are_refused_by_name(two):
    async def main():
        with pytest.raises(UserError, match=str(2**31)):
            await two.submit(Request([1, 2**31], SamplingParams(1)))

    serve(two, main)
