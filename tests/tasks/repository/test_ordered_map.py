"""The results of an OrderedMap depend on the items alone, whichever work ends first."""

import asyncio

import pytest

from composer_jax.tasks.repository.build import OrderedMap


class GatedWork:
    """Work that ends when it is released; records the started and the cancelled items."""

    def __init__(self):
        self.gates, self.started, self.cancelled = {}, [], []

    def release(self, *items):
        for item in items:
            self.gates.setdefault(item, asyncio.Event()).set()

    async def __call__(self, item):
        self.started.append(item)
        try:
            await self.gates.setdefault(item, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.cancelled.append(item)
            raise
        if item < 0:
            raise ValueError(item)
        return item * 10


def test_results_come_in_the_order_of_the_items_while_work_runs_ahead():
    async def go():
        work = GatedWork()
        stream = OrderedMap(iter([1, 2, 3]), work, ahead=2)
        first = asyncio.ensure_future(stream.next())
        work.release(2)
        while len(work.started) < 2:
            await asyncio.sleep(0)
        assert work.started == [1, 2] and not first.done()
        work.release(1, 3)
        return [await first, await stream.next(), await stream.next(), await stream.next()]

    assert asyncio.run(go()) == [(1, 10), (2, 20), (3, 30), None]


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_a_caller_continues_after_its_last_item(ahead):
    async def go():
        work, taken = GatedWork(), []
        work.release(*range(8))
        stream = OrderedMap(iter(range(8)), work, ahead)
        other = OrderedMap(iter(range(2)), work, ahead)
        for source in (stream, stream, other, stream, other, stream):
            taken.append((await source.next())[0])
        await stream.close()
        await other.close()
        return taken

    assert asyncio.run(go()) == [0, 1, 0, 2, 1, 3]


def test_errors_are_raised_at_their_place_and_close_waits_for_started_work():
    async def go():
        work = GatedWork()
        work.release(1, -2)
        stream = OrderedMap(iter([1, -2, 3]), work, ahead=3)
        assert await stream.next() == (1, 10)
        await stream.close()
        assert work.cancelled == [3]
        failing = OrderedMap(iter([-2]), work, ahead=3)
        with pytest.raises(ValueError):
            await failing.next()
        await failing.close()

    asyncio.run(go())
