"""How many sessions are open at once, and what their number changes: how many slots are in use, and no token."""

import asyncio
import logging

import numpy as np
import pytest

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.sampler import drafts, engine
from composer_jax.sampler.run_schedule import StepOutput
from composer_jax.sampler.runner import NewTokens
from composer_jax.sampler.sequence import Limits
from composer_jax.sampler.session_gate import SessionGate
from tests.sampler.conversations import assert_same, converse, run_all
from tests.virtual_clock import run_virtually

SEEDS = list(range(100, 112))
SIZES = {"turns": 2, "branches": 2, "longest": 5, "max_tokens": 20}
PAGE = 10
LIMITS = Limits(PAGE, n_pages=40, shards=2, rows=4, prefill_shapes=((1, 8),), decode_steps=4)
"""8 slots and 800 tokens."""


class Gate:
    """A gate whose sessions are numbers."""

    def __init__(self, limits=LIMITS, max_model_len=200):
        self.held, self.opened = 0, []
        self.gate = SessionGate(limits, max_model_len, lambda: self.held, lambda: None)
        self.tasks = []

    async def open(self, *names, ahead=False):
        """Asks for sessions; returns all names that have opened since the last call."""
        for name in names:
            self.tasks.append(
                asyncio.create_task(self.gate.open(lambda name=name: self.opened.append(name), ahead=ahead))
            )
        return await self.new()

    async def close(self, n, tokens):
        for _ in range(n):
            self.gate.close(tokens)
        return await self.new()

    async def new(self):
        for _ in range(3):
            await asyncio.sleep(0)
        opened, self.opened = self.opened, []
        return opened

    async def leave(self):
        self.gate.end(RuntimeError("ended"))
        await asyncio.gather(*self.tasks, return_exceptions=True)


def test_as_many_sessions_as_slots_open_before_one_has_ended_and_then_those_that_fit():
    async def main():
        gate = Gate()
        assert await gate.open(*range(100)) == list(range(8))
        assert len(await gate.close(2, 35)) == 3, "800 * 0.8 / (49/64 * 80 + 15/64 * 40) = 9.1 sessions"
        for _ in range(60):
            await gate.close(1, 35)
        assert gate.gate.n_open == 15, "800 * 0.8 / 40 = 16; the guess of 80 tokens is not yet forgotten"
        for _ in range(30):
            await gate.close(1, 160)
        assert gate.gate.n_open == 4, "longer contexts: as many as fit at 200 tokens each"
        await gate.leave()

    asyncio.run(main())


def test_held_pages_stop_sessions_that_open_at_the_soft_limit_and_those_ahead_at_the_hard_one():
    async def main():
        gate = Gate()
        await gate.open(*range(8))
        gate.held = 64  # of 80
        assert await gate.close(1, 0) == [] and await gate.open("a") == ["a"]
        gate.held = 65
        assert await gate.close(1, 0) == [] and await gate.open("b") == []
        assert await gate.open("suite", ahead=True) == ["suite"]
        gate.held = 73
        await gate.close(1, 0)
        assert await gate.open("late suite", ahead=True) == []
        gate.held = 64
        gate.gate.admit()
        assert await gate.new() == ["late suite"]
        assert await gate.close(1, 0) == ["b"] and await gate.open("c", "d") == []
        gate.held = 80
        assert await gate.close(4, 0) == [] and gate.gate.n_open == 4
        assert await gate.close(1, 0) == ["c"], "as many as always fit open however many pages are held"
        await gate.leave()

    asyncio.run(main())


def test_a_session_that_is_cancelled_while_it_waits_takes_no_place():
    async def main():
        gate = Gate()
        await gate.open(*range(8))
        assert await gate.open("a", "b", "c") == []
        gate.tasks[8].cancel()
        await gate.new()
        gate.gate.close(0)  # "b" gets the place, and is cancelled before it runs
        gate.tasks[9].cancel()
        assert await gate.new() == ["c"] and gate.gate.n_open == 8
        await gate.leave()
        assert gate.tasks[8].cancelled() and gate.tasks[9].cancelled()

    asyncio.run(main())


def test_a_line_says_that_sessions_wait_and_why_and_another_what_was_learned(caplog):
    caplog.set_level(logging.INFO)

    async def main():
        gate = Gate()
        await gate.open(*range(100))
        for _ in range(20):
            await gate.close(1, 35)
        await gate.leave()

    asyncio.run(main())
    first, second = [record.getMessage() for record in caplog.records]
    assert first == (
        "Sessions wait: 8 are open, and one needs about 80 of the 800 tokens of the cache (a guess until sessions "
        "end), which sessions fill to 80 %; a larger sampler.cache_tokens opens more."
    )
    assert "11 are open, and one needs about 54 of the 800 tokens of the cache (learned from 8)" in second


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
            most = max(most, sampler.stats.sessions)
            await asyncio.sleep(0.001)
        return [await task for task in tasks], most


@pytest.fixture(scope="module")
def expected(sampler):
    """Eight slots, of which each conversation has one."""
    return run_all(sampler, SEEDS, **SIZES)


@pytest.fixture
def all_open(monkeypatch):
    """No memory bounds the sessions, so that the tests below see more of them than any limit would open."""
    monkeypatch.setattr(SessionGate, "_has_room", lambda self, share: True)


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


# -- slots in use -----------------------------------------------------------------------------------------------------

TURNS, SAMPLING_S, TOOLS_S = 4, 2.5, 7.5
STEPS = 4
TOKENS = 8
"""Of a message, which takes two decode calls."""


def slots_in_use(new_sampler, monkeypatch, slots: int, cache_tokens: int, episodes: int) -> float:
    """The mean fraction of the slots in use while episodes sample for 10 s and run tools for 30 s, without the first
    and the last of them.

    Scheduler, gate and engine are real. The device calls take simulated time and sample nothing but 1.
    """

    def run(runner, speculation, schedule, handles, version):
        n = [min(STEPS, handle.sequence.budget) for handle in handles]
        return StepOutput(version, None, [NewTokens([1] * k, [0.0] * k, [0.0] * k) for k in n])

    run.seconds = SAMPLING_S * STEPS / TOKENS
    monkeypatch.setattr(engine, "run_schedule", run)
    sampler = new_sampler(slots=slots, cache_tokens=cache_tokens, decode_steps=STEPS, stall_seconds=0)
    used, ended = [], 0

    async def play(seed):
        nonlocal ended
        session, context = await sampler.open(seed), [seed % 24]
        for _ in range(TURNS):
            context += (await session.sample(context, SamplingParams(TOKENS))).tokens
            await asyncio.sleep(TOOLS_S * np.random.default_rng(seed).uniform(0.5, 1.5))
        session.close()
        ended += 1

    async def main():
        async with sampler.serving():
            playing = asyncio.gather(*(play(seed) for seed in range(episodes)))
            while ended < episodes - 6 * slots:
                await asyncio.sleep(0.1)
                used.append((ended, sampler.stats.running / slots))
            await playing

    run_virtually(main())
    return float(np.mean([fraction for n, fraction in used if n > 4 * slots]))


def test_tools_leave_their_slots_to_others_where_the_cache_holds_more_sessions(new_sampler, monkeypatch):
    """64 slots; an episode holds 33 tokens at the end, 40 in whole pages, so 80 % of the caches hold 64 and 256."""
    assert slots_in_use(new_sampler, monkeypatch, 64, 3200, 800) == pytest.approx(0.25, abs=0.03)
    assert slots_in_use(new_sampler, monkeypatch, 64, 12800, 800) >= 0.85
