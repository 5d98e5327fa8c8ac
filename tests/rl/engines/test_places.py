"""A fleet whose engines come and go, over TCP in one process: tokens, losses, and sentences where there is none."""

import asyncio
import contextlib

import pytest

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.rl.engines import connection, router
from composer_jax.rl.engines.config import FleetConfig
from composer_jax.rl.engines.engine_places import EngineRefused, ListedEngine
from tests.rl.engines.seeded_engine import Engine, new_fleet
from tests.rl.workers.seeded_policy import until

PARAMS = SamplingParams(64)


class Places:
    """Places that the test changes by `set`."""

    advice = "Add a place."

    def __init__(self, *places):
        self.places, self.changed = places, asyncio.Event()

    def set(self, *places):
        self.places = places
        self.changed.set()

    async def looks(self):
        while True:
            self.changed.clear()
            yield self.places
            await self.changed.wait()


class Place:
    """A place whose engine is not there before `port` is set, or is refused."""

    name = "a node"

    def __init__(self, refusal=""):
        self.refusal, self.port = refusal, 0

    async def locate(self):
        if self.refusal:
            raise EngineRefused(self.refusal)
        if not self.port:
            raise ConnectionError("its process has ended")
        return f"127.0.0.1:{self.port}"


def at(engine):
    return ListedEngine(f"127.0.0.1:{engine.port}")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(connection, "RETRY_S", 0.05)
    monkeypatch.setattr(router, "LOOK_S", 0.05)


@contextlib.asynccontextmanager
async def engines(*members):
    async with contextlib.AsyncExitStack() as stack:
        for member in members:
            await stack.enter_async_context(member.serving())
            await stack.enter_async_context(member.listening())
        yield


async def play(policy, seed):
    session, context = await policy.open(seed), [7]
    for branch in range(3):
        context = [*context, *(await session.sample(context, PARAMS, branch=branch)).tokens]
    session.close()
    return context


async def test_sessions_of_a_place_that_is_gone_go_on_at_one_that_has_come():
    seeds, first, second = range(6), Engine(pause_after=10), Engine()
    one = Engine()
    async with engines(one, first, second):
        expected = [await play(one, seed) for seed in seeds]
        places = Places(at(first))
        async with (fleet := new_fleet([], places=places)).serving():
            playing = [asyncio.create_task(play(fleet, seed)) for seed in seeds]
            await until(lambda: first.waiting == len(seeds))
            places.set(at(first), at(second))
            await until(lambda: fleet.metrics()["engines_newest"] == 2)
            places.set(at(second))
            assert await asyncio.gather(*playing) == expected
            assert fleet.resampled == len(seeds) and len(first.samples) + len(second.samples) == 4 * len(seeds)
            await until(lambda: not first.open_sessions)
            assert fleet.metrics()["engines_lost"] == 1 and fleet.metrics()["engines_newest"] == 1
            places.set(at(second), at(first))
            await until(lambda: fleet.metrics()["engines_newest"] == 2)
            assert fleet.metrics()["engines_lost"] == 1


async def test_an_engine_that_was_started_again_elsewhere_is_used_there():
    place, dying, again = Place(), Engine(), Engine()
    async with again.serving(), dying.serving(), (fleet := new_fleet([], places=Places(place))).serving():
        async with dying.listening():
            place.port = dying.port
            tokens = await play(fleet, 3)
        place.port = 0
        await until(lambda: "its process has ended" in fleet.router.links[0].state)
        async with again.listening():
            place.port = again.port
            assert await play(fleet, 3) == tokens and again.samples
            assert f"127.0.0.1:{again.port} has version 0" == fleet.router.links[0].state


async def test_no_place_at_all_is_said_when_the_patience_is_over():
    async with new_fleet([], FleetConfig(patience_s=0.3), places=Places()).serving() as fleet:
        with pytest.raises(UserError, match=r"No engine .* for 0 s: there is none. Add a place. The same command"):
            await fleet.open(1)


async def test_places_that_are_all_refused_end_the_run_and_one_that_is_not_does_not():
    engine, refused = Engine(), Place("cannot be started: no room.")
    async with engines(engine):
        places = Places(refused, at(engine))
        async with (fleet := new_fleet([], places=places)).serving():
            assert await play(fleet, 1)
            places.set(refused)
            with pytest.raises(UserError, match=r"a node cannot be started: no room.. Add a place"):
                await fleet.open(1)
