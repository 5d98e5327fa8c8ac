"""The clock of an episode: what it counts, where it cuts, and what passes through it."""

import asyncio

import pytest

from composer_jax.agent.episode_clock import EpisodeClock, OutOfTime
from tests.virtual_clock import run_virtually


def virtually(test):
    """A test that is a coroutine function, on a virtual clock."""
    return lambda: run_virtually(test())


def now():
    return asyncio.get_running_loop().time()


@virtually
async def test_a_block_is_cut_when_its_seconds_are_used_up_and_pauses_do_not_count():
    clock = EpisodeClock(10.0)
    with pytest.raises(OutOfTime, match="10 s"):
        async with clock.running():
            await asyncio.sleep(4)
            with clock.paused():
                await asyncio.sleep(1000)
            await asyncio.sleep(3)
            with clock.paused():
                await asyncio.sleep(1000)
            await asyncio.sleep(100)
    assert now() == pytest.approx(2010)


@virtually
async def test_overlapping_pauses_last_until_the_last_one_ends():
    clock = EpisodeClock(10.0)

    async def wait(begin_s, seconds):
        await asyncio.sleep(begin_s)
        with clock.paused():
            await asyncio.sleep(seconds)

    with pytest.raises(OutOfTime):
        async with clock.running():
            await asyncio.gather(wait(1, 50), wait(2, 100))  # counts the second before and nothing else
            await asyncio.sleep(100)
    assert now() == pytest.approx(102 + 9)


def test_what_a_block_raises_itself_passes_through():
    async def go(raised):
        async with EpisodeClock(10.0).running():
            raise raised

    for raised in (TimeoutError("of a tool"), ZeroDivisionError()):
        with pytest.raises(type(raised)) as error:
            run_virtually(go(raised))
        assert error.value is raised


@virtually
async def test_a_cancelled_pause_is_cancelled_and_nothing_is_left_running():
    clock = EpisodeClock(10.0)

    async def block():
        async with clock.running():
            with clock.paused():
                await asyncio.sleep(1000)

    task = asyncio.create_task(block())
    await asyncio.sleep(50)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with clock.paused():  # outside of a block: as while a workspace is closed
        await asyncio.sleep(1)


@virtually
async def test_cleaning_up_after_the_cut_may_pause():
    clock = EpisodeClock(10.0)
    with pytest.raises(OutOfTime):
        async with clock.running():
            try:
                await asyncio.sleep(100)
            finally:
                with clock.paused():
                    await asyncio.sleep(5)
    assert now() == pytest.approx(15)


@virtually
async def test_without_a_limit_nothing_is_cut():
    clock = EpisodeClock()
    async with clock.running():
        with clock.paused():
            await asyncio.sleep(1e6)
        await asyncio.sleep(1e6)
