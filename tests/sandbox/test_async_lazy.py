"""Values that threads make once, and the trees of a pool that are such values."""

import asyncio
import threading

import pytest

from composer_jax.sandbox.async_lazy import AsyncLazy
from composer_jax.sandbox.tree_cache import MAX_TREES, TreeCache


def test_values_made_of_other_values_do_not_wait_for_free_threads():
    inner = [AsyncLazy(lambda n=n: n) for n in range(40)]
    together = threading.Barrier(8)

    def outer(n):
        if n < 8:
            together.wait(timeout=30)  # every thread is taken when the first of them asks
        return inner[n].get_here() + 1

    async def go():
        return await asyncio.gather(*(AsyncLazy(lambda n=n: outer(n)).get() for n in range(40)))

    assert asyncio.run(asyncio.wait_for(go(), timeout=60)) == list(range(1, 41))


def test_a_value_is_computed_once_and_again_after_an_error():
    made = []

    def make():
        made.append(1)
        if len(made) == 1:
            raise OSError("first")
        return len(made)

    value = AsyncLazy(make)
    with pytest.raises(OSError):
        value.get_here()
    assert value.get_here() == asyncio.run(value.get()) == 2 and len(made) == 2


@pytest.mark.parametrize("fails", [False, True])
def test_settled_waits_for_copies_whose_callers_were_cancelled(tmp_path, fails):
    begun, go_on, ended = threading.Event(), threading.Event(), []

    def make(folder):
        begun.set()
        assert go_on.wait(30)
        ended.append(folder)
        if fails:
            raise OSError(folder)

    async def go():
        unheard = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unheard.append(context))
        trees = TreeCache(make)
        asking = asyncio.ensure_future(trees.get(tmp_path))
        await asyncio.to_thread(begun.wait, 30)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        settling = asyncio.ensure_future(trees.settled())
        await asyncio.sleep(0)
        assert not settling.done()
        go_on.set()
        await settling
        return unheard

    assert asyncio.run(go()) == [] and ended == [tmp_path]


def test_the_least_recently_used_tree_goes_first(tmp_path):
    made = []

    async def go():
        trees = TreeCache(lambda folder: made.append(folder.name))
        for name in [*range(MAX_TREES), 0, MAX_TREES, 0, 1]:
            await trees.get(tmp_path / str(name))

    asyncio.run(go())
    assert made[MAX_TREES:] == [str(MAX_TREES), "1"]
