"""Which session gets the next slot, and a sampler between two servings."""

import asyncio

import jax
import pytest

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.sampler.request import Request, RequestHandle
from composer_jax.sampler.runner import NewTokens
from composer_jax.sampler.session import EngineSession
from composer_jax.sampler.session_gate import Place
from tests.sampler.conversations import assert_same, run_all

SEEDS = [100, 101]


def test_a_session_that_goes_ahead_gets_the_next_slot(sampler):
    async def main():
        order = []

        async def wait(name, ahead):
            session = await sampler.open(1, ahead=ahead)
            order.append(name)
            return session

        async with sampler.serving():
            sessions = [await sampler.open(seed) for seed in range(sampler.config.slots)]
            waiting = [asyncio.create_task(wait(*who)) for who in (("a", False), ("b", False), ("suite", True))]
            cancelled = asyncio.create_task(sampler.open(2, ahead=True))
            await asyncio.sleep(0.01)
            cancelled.cancel()
            for n in range(1, 4):
                sessions[n].close()
                await asyncio.sleep(0.01)
                assert len(order) == n
            for session in (sessions[0], *sessions[4:], *[await task for task in waiting]):
                session.close()
        assert order == ["suite", "a", "b"]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_the_requests_of_a_session_that_goes_ahead_get_the_next_slot(new_sampler):
    async def main(sampler):
        order = []

        async def ask(name, session):
            await session.sample([1, 2], SamplingParams(20))
            order.append(name)

        async with sampler.serving():
            names = ["running", "a", "b", "suite"]
            sessions = [await sampler.open(1, ahead=name == "suite") for name in names]
            await asyncio.gather(*(ask(*pair) for pair in zip(names, sessions, strict=True)))
        assert order.index("suite") < order.index("b")

    asyncio.run(asyncio.wait_for(main(new_sampler(slots=1, cache_tokens=256)), 60))


def test_a_session_that_is_closed_when_its_turn_comes_asks_for_nothing():
    class Gate:
        async def wait_for_turn(self, place):
            session.close()

        def close(self, place):
            pass

    session = EngineSession(pytest.fail, 64, 1, Gate(), Place(False, 1.0), lambda lease: None)
    with pytest.raises(RuntimeError, match="this session is closed"):
        asyncio.run(session.sample([1, 2], SamplingParams(3)))


def test_a_reader_that_leaves_frees_the_pages_before_the_next_device_call():
    async def main():
        future, cancelled = asyncio.get_running_loop().create_future(), []
        handle = RequestHandle(Request([1], SamplingParams(3)), 3, (), None, future)
        handle.on_cancel = cancelled.append
        handle.extend(NewTokens([5], [0.0], [0.0]), 1)
        chunks = aiter(handle)
        assert (await anext(chunks)).tokens == [5]
        await chunks.aclose()
        assert cancelled == [handle]

    asyncio.run(main())


def test_a_released_sampler_holds_no_arrays_and_samples_the_same_after_an_update(new_sampler, weights):
    sampler = new_sampler()
    before, arrays = run_all(sampler, SEEDS), len(jax.live_arrays())
    sampler.release()
    held = len(jax.tree.leaves(weights)) + len(jax.tree.leaves(sampler.engines[0].runner._new_cache()))
    assert arrays - len(jax.live_arrays()) >= held
    with pytest.raises(RuntimeError, match="call Sampler.update before serving"):
        run_all(sampler, SEEDS[:1])
    sampler.update(*weights, version=3)
    assert_same(run_all(sampler, SEEDS), before)
