"""How many sessions are open at once, and what their number changes: how many slots are in use, and no token."""

import asyncio
import dataclasses
import logging

import numpy as np
import pytest

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.sampler import drafts, engine
from composer_jax.sampler.runner import NewTokens
from composer_jax.sampler.sequence import Limits
from composer_jax.sampler.session_gate import PATIENCE_S, SessionGate
from composer_jax.sampler.session_queue import SessionQueue
from composer_jax.sampler.start_schedule import StepOutput
from tests.sampler.conversations import CONFIG, assert_same, converse, run_all
from tests.virtual_clock import run_virtually

SEEDS = list(range(100, 112))
SIZES = {"turns": 2, "branches": 2, "longest": 5, "max_tokens": 20}
PAGE = 10
LIMITS = Limits(PAGE, n_pages=40, shards=2, rows=4, prefill_shapes=((1, 8),), decode_steps=4, fitting=2)
"""8 slots and 800 tokens, which hold four contexts of 200."""


class Gate:
    """A gate with the queue before it and the places that it has given, by the names of their sessions."""

    load = 0

    def __init__(self, limits=LIMITS, only_fitting=False, **options):
        self.busy, self.in_use, self.places, self.order, self.tasks = False, limits.n_pages * limits.shards, {}, [], {}
        self.gate = SessionGate(limits, lambda: self.busy, lambda: self.in_use, only_fitting=only_fitting)
        self.queue = SessionQueue([self], **options)

    async def open(self, *names, ahead=False):
        """Asks for sessions; returns all names that have opened since the last call."""

        async def enter(name):
            _, self.places[name] = await self.queue.open(ahead=ahead)
            self.order.append(name)

        for name in names:
            self.tasks[name] = asyncio.create_task(enter(name))
        return await self.new()

    async def close(self, *names, tokens=0):
        """Closes sessions whose longest contexts had that many tokens; returns the names that have opened."""
        for name in names:
            place = self.places.pop(name)
            if tokens:
                self.gate.note(place, tokens)
            self.gate.close(place)
        return await self.new()

    def ask(self, name):
        """A request of a session, which may have to wait for its turn."""

        async def request(place):
            await self.gate.wait_for_turn(place)
            self.gate.note(place, 1)

        self.tasks[name] = asyncio.create_task(request(self.places[name]))
        return self.tasks[name]

    async def new(self):
        for _ in range(3):
            await asyncio.sleep(0)
        opened, self.order = self.order, []
        return opened

    async def leave(self):
        for part in (self.queue, self.gate):
            part.end(RuntimeError("ended"))
        return await asyncio.gather(*self.tasks.values(), return_exceptions=True)


def test_as_many_sessions_as_slots_open_before_one_has_ended_and_then_those_that_need_no_more_than_the_soft_limit():
    async def main():
        gate = Gate()
        opened = await gate.open(*range(200))
        assert opened == list(range(8))
        for _ in range(60):
            opened += await gate.close(opened.pop(0), tokens=35)
        assert gate.gate.n_open == 15, "800 * 0.8 / 40 = 16; the guess of 80 tokens is not yet forgotten"
        for _ in range(60):
            opened += await gate.close(opened.pop(0), tokens=160)
        assert gate.gate.n_open == 8, "four at 160 tokens each, but there are eight slots"
        await gate.leave()

    asyncio.run(main())


def test_contexts_that_grow_beyond_what_others_needed_count_as_they_are():
    """Short episodes end first. What they needed says little of those that are still open."""

    async def main():
        gate = Gate()
        opened = await gate.open(*range(200))
        for _ in range(40):
            opened += await gate.close(opened.pop(0), tokens=10)
        n_open = gate.gate.n_open
        assert n_open > 40
        for name in opened[:8]:
            gate.gate.note(gate.places[name], 80)
        assert await gate.close(*opened[8:50]) == [] and gate.gate.n_open == n_open - 42, "8 * 8 pages are 80 %"
        await gate.leave()

    asyncio.run(main())


def test_sessions_that_go_ahead_open_first_and_up_to_the_hard_limit():
    async def main():
        gate = Gate()
        await gate.open(*range(8))  # 64 of 80 pages
        assert await gate.open("a") == [] and await gate.open("suite") == []
        assert await gate.open("b", ahead=True) == ["b"], "72 pages"
        assert await gate.open("c", ahead=True) == []
        assert await gate.close(0) == ["c"]
        await gate.leave()

    asyncio.run(main())


def test_where_contexts_outgrow_the_cache_the_last_sessions_wait_until_others_have_closed(caplog):
    caplog.set_level(logging.INFO)

    async def main():
        gate = Gate()
        await gate.open(*range(7))
        await gate.open("suite", ahead=True)
        given_up = []
        for name, place in gate.places.items():
            place.give_up_pages = lambda name=name: given_up.append(name)
        for name in gate.places:
            gate.gate.note(gate.places[name], 90)  # 72 pages, the hard limit
        assert given_up == []
        gate.gate.note(gate.places[0], 91)
        assert given_up == [6], "the suite opened later, and goes ahead"
        gate.gate.note(gate.places[0], 120)
        assert given_up == [6], "66 pages"
        gate.gate.note(gate.places[1], 200)
        assert given_up == [6, 5]
        waiting = [gate.ask(6), gate.ask(5)]
        assert all([gate.ask(name) and await gate.new() == [] and gate.tasks[name].done() for name in (0, 4, "suite")])
        assert await gate.open("a") == [] and not any(task.done() for task in waiting)
        assert await gate.close(2) == ["a"] and not waiting[0].done() and waiting[1].done(), "fewer than slots are open"
        assert await gate.close(1) == [] and waiting[0].done()
        await gate.leave()

    asyncio.run(main())
    (line,) = [record.getMessage() for record in caplog.records if "grown" in record.getMessage()]
    assert line == (
        "Sessions wait: the contexts of 8 open sessions have grown beyond 90 % of the 800 tokens of the cache, so the "
        "last 2 of them go on when others have closed; a larger sampler.cache_tokens lets more run."
    )


def test_nobody_is_held_back_while_contexts_share_so_much_that_the_cache_holds_them():
    async def main():
        gate = Gate()
        await gate.open(*range(8))
        gate.in_use = 72
        for place in gate.places.values():
            gate.gate.note(place, 160)  # 128 pages, of which there are 80
        assert await held_back(gate) == []
        gate.in_use = 73
        gate.gate.note(gate.places[0], 161)
        gate.in_use = 57
        assert await held_back(gate) == [7]
        gate.in_use = 56
        await gate.close(0)
        assert await held_back(gate) == [], "16 more are 72"
        await gate.leave()

    async def held_back(gate):
        tasks = {name: gate.ask(name) for name in gate.places}
        await gate.new()
        return [name for name, task in tasks.items() if not task.done()]

    asyncio.run(main())


def test_sessions_that_fit_however_long_they_grow_never_wait():
    async def main():
        gate = Gate()
        await gate.open(*range(4))
        for name in range(4):
            gate.gate.note(gate.places[name], 200)
            await asyncio.wait_for(gate.ask(name), 1)
        assert await gate.open("a") == ["a"]
        gate.gate.note(gate.places["a"], 10)
        task = gate.ask("a")
        await gate.new()
        assert not task.done() and isinstance((await gate.leave())[-1], RuntimeError)

    asyncio.run(main())


def test_one_coroutine_opens_as_many_sessions_as_slots_however_long_their_contexts_are():
    async def main():
        gate = Gate()
        for name in range(8):
            assert await gate.open(name) == [name]
            gate.gate.note(gate.places[name], 200)
        assert await gate.open(8) == []
        await gate.leave()

    asyncio.run(main())


def test_a_session_that_is_held_back_goes_on_where_nobody_asks_for_anything():
    """As when one coroutine has opened several sessions and uses one after another."""

    async def main():
        gate, clock = Gate(), asyncio.get_running_loop()
        await gate.open(*range(8))
        for name in range(8):
            gate.gate.note(gate.places[name], 200)
        requests = [gate.ask(name) for name in range(4, 8)]
        gate.busy = True
        await asyncio.sleep(3 * PATIENCE_S)
        assert not any(task.done() for task in requests)
        gate.busy = False
        for n in range(1, 5):
            await asyncio.wait([task for task in requests if not task.done()], return_when="FIRST_COMPLETED")
            await asyncio.sleep(1)
            assert sum(task.done() for task in requests) == n
        assert clock.time() > 6 * PATIENCE_S
        await gate.leave()

    run_virtually(main())


def test_a_request_that_waits_for_its_turn_ends_with_its_session():
    async def main():
        gate = Gate()
        await gate.open(*range(8))
        for name in range(8):
            gate.gate.note(gate.places[name], 200)
        first, second = gate.ask(7), gate.ask(7)
        await gate.new()
        assert first.cancelled() and not second.done()
        await gate.close(7)
        assert second.cancelled()
        await gate.leave()

    asyncio.run(main())


def test_a_session_that_is_cancelled_while_it_waits_takes_no_place_and_leaves_no_trace():
    async def main():
        gate = Gate()
        await gate.open(*range(8))
        assert await gate.open("a", "b", "c") == []
        gate.tasks["a"].cancel()
        await gate.new()
        gate.gate.close(gate.places[0])  # "b" gets the place, and is cancelled before it runs
        gate.tasks["b"].cancel()
        assert await gate.new() == ["c"] and gate.gate.n_open == 8
        await gate.open("head", *range(100, 200))
        for name in range(100, 200):
            gate.tasks[name].cancel()
        await gate.new()
        assert sum(map(len, gate.queue._waiting)) == 1
        await gate.leave()
        assert gate.tasks["a"].cancelled() and gate.tasks["b"].cancelled()

    asyncio.run(main())


@pytest.mark.parametrize(("options", "most"), [({"only_fitting": True}, 4), ({"most_sessions": 3}, 3)])
def test_other_bounds(options, most):
    async def main():
        gate = Gate(**options)
        assert len(await gate.open(*range(20))) == most
        assert await gate.open("suite", ahead=True) == [] and await gate.close(0) == ["suite"]
        await gate.leave()

    asyncio.run(main())


@pytest.mark.parametrize("is_waiting_at_first", [True, False])
def test_a_line_says_that_sessions_wait_and_why_and_another_what_was_learned(caplog, is_waiting_at_first):
    caplog.set_level(logging.INFO)

    async def main():
        gate = Gate()
        opened = await gate.open(*range(100 if is_waiting_at_first else 8))
        for name in range(8):
            opened += await gate.close(opened.pop(0), tokens=35)
            if not is_waiting_at_first:
                opened += await gate.open(100 + name)
        for name in range(200, 300):
            await gate.open(name)
        await gate.leave()

    asyncio.run(main())
    *first, second = [record.getMessage() for record in caplog.records]
    assert len(first) == is_waiting_at_first
    if first:
        assert first[0] == (
            "Sessions wait: 8 are open, and one needs about 80 of the 800 tokens of the cache (a guess until sessions "
            "end), which sessions fill to 80 %; a larger sampler.cache_tokens opens more."
        )
    assert "one needs about 54 of the 800 tokens of the cache (learned from 8)" in second


# -- the tokens are those of a slot per session ---------------------------------------------------------------------


async def converse_all(sampler, events=()):
    """All conversations of SEEDS at once; returns them and the most sessions that were open.

    events: awaited one after another meanwhile.
    """
    most = 0
    async with sampler.serving():
        tasks = [asyncio.create_task(converse(sampler, seed, **SIZES)) for seed in SEEDS]
        for event in events:
            await event()
        while not all(task.done() for task in tasks):
            most = max(most, sampler._sessions.n_open)
            await asyncio.sleep(0.001)
        return [await task for task in tasks], most


@pytest.fixture(scope="module")
def expected(sampler):
    """Eight slots, of which each conversation has one."""
    return run_all(sampler, SEEDS, **SIZES)


@pytest.fixture
def all_open(monkeypatch):
    """No memory bounds the sessions, so that the tests below see more of them than any limit would open."""
    monkeypatch.setattr(SessionGate, "has_room", lambda self, *, ahead: True)
    monkeypatch.setattr(SessionGate, "_hold_back", lambda self: None)


@pytest.mark.parametrize(
    "changes",
    [{}, {"cache_tokens": 64, "page_size": 4}, {"drafts": "prompt_lookup"}],
    ids=["slots", "pages", "drafts"],
)
def test_more_sessions_than_slots_sample_the_same_tokens(new_sampler, expected, monkeypatch, all_open, changes):
    """With a cache of one full context, sessions and running requests give up their pages again and again."""
    monkeypatch.setattr(drafts._Speeds, "should_verify", lambda self: True)
    sampler = new_sampler(slots=2, draft_tokens=3, **changes)
    actual, most = asyncio.run(asyncio.wait_for(converse_all(sampler), 120))
    assert_same(actual, expected)
    assert most == len(SEEDS)
    assert ("cache_tokens" in changes) == (sampler.stats.preemptions > 0)
    assert "drafts" not in changes or sampler.stats.accepted[0] > 0


@pytest.mark.parametrize("mode", ["recompute", "keep", "drain"])
def test_updates_in_flight_change_no_token_where_the_weights_are_the_same(
    new_sampler, weights, expected, all_open, mode
):
    sampler = new_sampler(slots=2)

    async def update():
        await asyncio.sleep(0.01)
        await sampler.update_serving(*weights, version=sampler.version + 1, mode=mode)

    actual, most = asyncio.run(asyncio.wait_for(converse_all(sampler, [update] * 5), 120))
    assert_same(actual, expected)
    assert most > sampler.config.slots and sampler.version == 8


# -- no bit depends on how long tools take ----------------------------------------------------------------------------


def test_where_only_fitting_sessions_open_no_bit_depends_on_how_long_tools_take(new_sampler):
    """Short episodes first: a gate that learns from them opens sessions that give up their pages, sooner or later."""
    sampler = new_sampler(slots=4, only_fitting=True)

    async def talk(seed, slow):
        rng, session = np.random.default_rng(seed), await sampler.open(seed)
        context, logprobs = [1 + seed % 20, 2, 3], []
        for _ in range(1 if seed < 12 else 7):
            sample = await session.sample(context, SamplingParams(5))
            context += [*sample.tokens, 3, 4]
            logprobs += sample.logprobs
            await asyncio.sleep(slow * 0.002 * rng.integers(1, 4))
        session.close()
        return context, logprobs

    async def main(slow):
        async with sampler.serving():
            return await asyncio.gather(*(talk(seed, slow) for seed in range(24)))

    sampled = []
    for slow in (0, 1, 5):
        sampler.reset_prefix_cache()
        sampled.append(asyncio.run(asyncio.wait_for(main(slow), 60)))
    assert sampled[0] == sampled[1] == sampled[2]


# -- slots in use -----------------------------------------------------------------------------------------------------

TURNS, SAMPLING_S, TOOLS_S = 4, 2.5, 7.5
STEPS = 4
TOKENS = 8
"""Of a message."""
ROUNDS = 3
"""Of a turn: one with its prefill call, and two with decode calls."""
ANSWER = [5] * 5
"""Of tools."""
PROMPT = 9
NECESSARY = ((PROMPT - 1) + (TURNS - 1) * len(ANSWER)) / TURNS
"""Tokens that a turn prefills where its session has kept its pages."""


def play_episodes(new_sampler, monkeypatch, slots, cache_tokens, sizes, lengths) -> tuple[float, float]:
    """Returns the mean fraction of the slots in use while episodes sample for 10 s and run tools for 30 s, without the
    first and the last of them, and the tokens that were prefilled for a turn.

    Scheduler, gate and engine are real. The device calls take simulated time and sample nothing but 1.

    sizes: of the mesh. lengths: turns of each episode.
    """

    all_ends = dict[object, float]()  # when the devices of an engine have made all calls

    def start(runner, speculation, schedule, handles, version):
        n = [min(STEPS, handle.sequence.budget - STEPS * handle.sequence.n_calls) for handle in handles]
        time = asyncio.get_running_loop().time
        all_ends[runner] = end = max(all_ends.get(runner, 0.0), time()) + SAMPLING_S / ROUNDS

        def finish():
            finish.seconds = end - time()
            return StepOutput(version, None, [NewTokens([1] * k, [0.0] * k, [0.0] * k) for k in n])

        return finish

    monkeypatch.setattr(engine, "start_schedule", start)
    model, shapes = dataclasses.replace(CONFIG, max_context=128), ((8, 8), (8, 64))
    fields = {"slots": slots, "cache_tokens": cache_tokens, "max_model_len": 128, "stall_seconds": 0}
    sampler = new_sampler(sizes, model, decode_steps=STEPS, prefill_shapes=shapes, **fields)
    used, ended = [], 0

    async def play(seed, turns):
        nonlocal ended
        session, rng = await sampler.open(seed), np.random.default_rng(seed)
        context = [seed % 24, seed // 24 % 24, seed // 576, *[2] * (PROMPT - 3)]
        for _ in range(turns):
            context += (await session.sample(context, SamplingParams(TOKENS))).tokens + ANSWER
            await asyncio.sleep(TOOLS_S * rng.uniform(0.5, 1.5))
        session.close()
        ended += 1

    async def main():
        async with sampler.serving():
            playing = asyncio.gather(*(play(seed, turns) for seed, turns in enumerate(lengths)))
            while ended < len(lengths) - 6 * slots:
                await asyncio.sleep(0.1)
                used.append((ended, sampler.stats.running / slots))
            await playing

    run_virtually(main())
    in_use = [fraction for n, fraction in used if n > 4 * slots]
    mean, prefilled = float(np.mean(in_use)) if in_use else 0.0, sampler.prefilled_tokens / sum(lengths)
    print(f"\n{slots} slots, mesh {sizes}, {cache_tokens=}: {mean:.2f} in use, {prefilled:.2f} tokens per turn")
    return mean, prefilled


def test_episodes_have_a_slot_each_where_the_cache_holds_no_more(new_sampler, monkeypatch):
    """A turn waits for about one call more, behind which its own start."""
    used, prefilled = play_episodes(new_sampler, monkeypatch, 64, 4096, {}, [TURNS] * 800)
    sampling = SAMPLING_S * (1 + 1 / ROUNDS)
    assert used == pytest.approx(sampling / (sampling + TOOLS_S), abs=0.03) and prefilled == pytest.approx(NECESSARY)


@pytest.mark.parametrize("sizes", [{}, {"data": 8}, {"replica": 8}], ids=str)
def test_tools_leave_their_slots_to_others_where_the_cache_holds_more_sessions(new_sampler, monkeypatch, sizes):
    """64 slots; an episode holds 56 tokens at the end, so 80 % of the cache hold 256. Sessions stay on their shards.

    With `replica`, eight engines have a scheduler each, and sessions stay on their engines.
    """
    used, prefilled = play_episodes(new_sampler, monkeypatch, 64, 17920, sizes, [TURNS] * 800)
    assert used >= 0.85 and prefilled < 1.1 * NECESSARY


def test_after_short_episodes_at_the_start_few_contexts_are_computed_again(new_sampler, monkeypatch):
    """The first 60 episodes, which end after a turn, say that the cache holds three times as many as it does."""
    _, prefilled = play_episodes(new_sampler, monkeypatch, 8, 1024, {}, [1] * 60 + [TURNS] * 60)
    assert prefilled < 1.5 * NECESSARY
