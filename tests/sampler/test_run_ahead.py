"""The next calls start while one is outstanding: surplus is dropped; pauses and new weights wait for what runs."""

import asyncio
import dataclasses
import functools
import threading

import pytest

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.sampler import device_calls
from composer_jax.sampler.device_calls import BusyTime, DeviceCalls
from composer_jax.sampler.request import Request
from composer_jax.sampler.sampler import Sampler
from composer_jax.sampler.sequence import SchedulerOutput, SequenceState
from composer_jax.sampler.watchdog import describe_stall
from tests.models.small import random_weights
from tests.sampler.conversations import CONFIG, END, sample_requests

STEPS = 4
PROMPT = (3, 9, 14, 2, 7)
LONG = SamplingParams(40)


class Broken(Exception):
    pass


def without_end_tokens(like: Sampler, weights) -> Sampler:
    sampler = Sampler(like.definition, like.mesh, like.config, end_tokens=())
    sampler.update(*weights, version=3)
    return sampler


@pytest.fixture(scope="module")
def endless(new_sampler, weights):
    """A sampler of two slots whose messages end at their budgets or at stop ids."""
    return without_end_tokens(new_sampler(slots=2, page_size=4), weights)


@pytest.fixture(scope="module")
def alone(endless):
    """The messages of some seeds, none beside another."""
    return [sample_requests(endless, [Request(PROMPT, LONG, seed)])[0].tokens for seed in range(4)]


class Recorder:
    """The starts and ends of a sampler's decode calls, and what is to go wrong in them."""

    def __init__(self, monkeypatch, sampler, failing: str = "", stuck: int | None = None):
        """failing: the event that raises Broken. stuck: number of the call that waits for `release` at its end."""
        self.events, self.failing, self.stuck = [], failing, stuck
        self.is_stuck, self.release = threading.Event(), threading.Event()
        runner = sampler.engines[0].runner
        monkeypatch.setattr(runner, "start_decode", functools.partial(self.start, runner.start_decode))

    def start(self, start_decode, *arguments):
        number = sum(event.startswith("start") for event in self.events)
        self.note(f"start {number}")
        finish = start_decode(*arguments)

        def read():
            if number == self.stuck:
                self.is_stuck.set()
                assert self.release.wait(60)
            self.note(f"finish {number}")
            return finish()

        return read

    def note(self, event: str) -> None:
        self.events.append(event)
        if event == self.failing:
            raise Broken(event)

    async def until_stuck(self) -> None:
        await asyncio.to_thread(self.is_stuck.wait, 60)

    @property
    def n_outstanding(self) -> int:
        return sum(1 if event.startswith("start") else -1 for event in self.events)


def run(main):
    return asyncio.run(asyncio.wait_for(main(), 120))


def test_a_call_starts_before_the_one_before_it_is_read_and_none_is_too_many_at_a_budget(endless, alone, monkeypatch):
    recorder = Recorder(monkeypatch, endless)
    decoded = endless.decoded_tokens
    (sample,) = sample_requests(endless, [Request(PROMPT, SamplingParams(18), 0)])
    assert sample.tokens == alone[0][:18] and endless.decoded_tokens - decoded == 18
    assert recorder.events == (
        "start 0, start 1, finish 0, start 2, finish 1, start 3, finish 2, start 4, finish 3, finish 4".split(", ")
    )


def test_drafts_wait_for_the_tokens_that_they_follow(new_sampler, monkeypatch):
    sampler = new_sampler(slots=2, drafts="prompt_lookup", draft_tokens=3)
    recorder = Recorder(monkeypatch, sampler)
    sample_requests(sampler, [Request(PROMPT, SamplingParams(10), seed) for seed in range(2)])
    assert [event.split()[0] for event in recorder.events] == ["start", "finish"] * (len(recorder.events) // 2)


def stop_in_second_call(tokens: list[int]) -> int:
    """Where a token is that did not come before, other than the last of the call."""
    return next(i for i in range(STEPS, 2 * STEPS - 1) if tokens[i] not in tokens[:i])


def test_what_is_sampled_after_a_stop_is_dropped(endless, alone, monkeypatch):
    recorder, decoded = Recorder(monkeypatch, endless), endless.decoded_tokens
    n = 1 + stop_in_second_call(alone[0])
    params = dataclasses.replace(LONG, stop_ids=(alone[0][n - 1],))
    (sample,) = sample_requests(endless, [Request(PROMPT, params, 0)])
    assert sample.tokens == alone[0][:n] and sample.finish_reason == "stop"
    assert len(sample.logprobs) == len(sample.versions) == endless.decoded_tokens - decoded == n
    assert recorder.events[-3:] == ["start 2", "finish 1", "finish 2"], "the third call was in vain"
    assert endless.stats.held_pages == 0


def test_a_message_that_ends_on_the_device_samples_nothing_in_the_call_behind(new_sampler, monkeypatch):
    sampler, outputs = new_sampler(slots=1), []
    start_decode = sampler.engines[0].runner.start_decode

    def start(*arguments):
        finish = start_decode(*arguments)

        def read():
            outputs.append(finish())
            return outputs[-1]

        return read

    monkeypatch.setattr(sampler.engines[0].runner, "start_decode", start)
    for seed in range(20):
        (sample,) = sample_requests(sampler, [Request(PROMPT, LONG, seed)])
        if sample.finish_reason == "stop":
            assert outputs[-2][0].tokens[-1] == END and outputs[-1][0].tokens == []
            return
    raise AssertionError("no message has an end token")


def test_a_slot_that_changes_hands_does_not_go_on_with_the_token_of_the_last_request(new_sampler, weights):
    """One slot, contexts of one token, which decode at once, and stops inside calls that others follow."""
    sampler = without_end_tokens(new_sampler(slots=1, page_size=4), weights)
    requests = [
        Request([token], SamplingParams(5 + token, stop_ids=stops), token)
        for token, stops in enumerate([(), (5, 6, 7), (1, 2, 3), (8, 9, 10, 11), (), (3, 4), (12, 13), (20,)])
    ]
    together = sample_requests(sampler, requests)
    assert {sample.finish_reason for sample in together} == {"stop", "length"}
    assert [sample.tokens for sample in together] == [sample_requests(sampler, [r])[0].tokens for r in requests]


def test_requests_that_give_up_their_pages_lose_no_token(new_sampler, weights, alone):
    sampler = without_end_tokens(new_sampler(slots=4, page_size=4, cache_tokens=64), weights)
    samples = sample_requests(sampler, [Request(PROMPT, LONG, seed) for seed in range(4)])
    assert sampler.stats.preemptions > 0 and [sample.tokens for sample in samples] == alone


# -- errors -----------------------------------------------------------------------------------------------------------


def serve_until_broken(sampler: Sampler, params: list[SamplingParams]) -> list[str]:
    """What requests raise where the serving, too, ends with Broken."""
    outcomes = []

    async def main():
        async with sampler.serving():
            handles = [sampler.submit(Request(PROMPT, p, seed)) for seed, p in enumerate(params)]
            outcomes.extend(await asyncio.gather(*handles, return_exceptions=True))

    with pytest.raises(Broken):
        run(main)
    return [repr(outcome) for outcome in outcomes]


@pytest.mark.parametrize("event", ["start 0", "start 2", "finish 1", "finish 2"])
def test_a_failure_ends_all_requests_with_its_own_error_and_no_call_follows(endless, alone, monkeypatch, event):
    recorder = Recorder(monkeypatch, endless, failing=event)
    outcomes = serve_until_broken(endless, [LONG] * 4)  # two of which wait
    assert outcomes == [repr(Broken(event))] * 4
    assert recorder.events[-1] == event and not endless.engines[0]._calls
    recorder.failing = ""
    assert sample_requests(endless, [Request(PROMPT, LONG, 0)])[0].tokens == alone[0]


@pytest.mark.parametrize("starts", [True, False], ids=["read", "start"])
def test_routing_that_cannot_be_read_ends_all_requests_with_its_error(new_sampler, monkeypatch, starts):
    model = dataclasses.replace(CONFIG, cache_routing=True)
    sampler = new_sampler(model=model, weights=random_weights(CONFIG), slots=2)

    def fail(*_):
        raise Broken("routing")

    monkeypatch.setattr(sampler.engines[0].runner, "start_routing", lambda *_: fail if starts else fail())
    outcomes = serve_until_broken(sampler, [SamplingParams(3, return_routing=True), LONG, LONG])
    assert outcomes == ["Broken('routing')"] * 3


# -- pauses, new weights, and a cache that is forgotten ----------------------------------------------------------------


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_waits_for_all_outstanding_calls(endless, alone, monkeypatch, mode):
    recorder = Recorder(monkeypatch, endless, stuck=2)

    async def main():
        async with endless.serving():
            handles = [endless.submit(Request(PROMPT, SamplingParams(20), seed)) for seed in range(2)]
            await recorder.until_stuck()
            assert recorder.n_outstanding == 2
            text = describe_stall(endless.engines[0]._activity(), 60)
            assert "a decode call of 2 rows" in text and ", and 1 call behind;" in text
            pauses = [asyncio.create_task(endless.pause(mode))]
            await asyncio.sleep(0.01)
            endless.resume()  # and again at once: the call that is outstanding is that of before
            await asyncio.sleep(0)
            pauses.append(asyncio.create_task(endless.pause(mode)))
            await asyncio.sleep(0.01)
            assert pauses[0].done() and not pauses[1].done()
            recorder.release.set()
            await pauses[1]
            assert recorder.n_outstanding == 0 and not endless.engines[0]._calls
            events = len(recorder.events)
            await asyncio.sleep(0.02)
            assert len(recorder.events) == events
            endless.resume()
            return await asyncio.gather(*handles)

    for sample, tokens in zip(run(main), alone[:2], strict=True):
        n = len(sample.tokens)
        assert sample.tokens == tokens[:n] and n == (4 * STEPS if mode == "abort" else 20)


def test_outstanding_calls_end_with_the_weights_that_they_started_with(endless, weights, monkeypatch):
    recorder = Recorder(monkeypatch, endless, stuck=1)

    async def main():
        async with endless.serving():
            handle = endless.submit(Request(PROMPT, LONG, 0))
            await recorder.until_stuck()
            update = asyncio.create_task(endless.update_serving(*weights, version=4))
            await asyncio.sleep(0.01)
            assert endless.version == 3
            recorder.release.set()
            await update
            assert recorder.n_outstanding == 0
            return await handle

    versions = run(main).versions
    endless.update(*weights, version=3)
    assert versions == [3] * (3 * STEPS) + [4] * (40 - 3 * STEPS)


def test_a_cache_that_is_forgotten_while_calls_are_outstanding_changes_no_token(endless, alone, monkeypatch):
    recorder = Recorder(monkeypatch, endless, stuck=1)

    async def main():
        async with endless.serving():
            handles = [endless.submit(Request(PROMPT, LONG, seed)) for seed in range(3)]
            await recorder.until_stuck()
            endless.reset_prefix_cache()
            recorder.release.set()
            samples = await asyncio.gather(*handles)
            endless.reset_prefix_cache()
            again = await endless.submit(Request(PROMPT, LONG, 3))
            return samples, again

    samples, again = run(main)
    assert [sample.tokens for sample in (*samples, again)] == alone and again.cached == 0


def test_time_with_two_calls_counts_once(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(device_calls.time, "perf_counter", lambda: clock[0])
    busy = BusyTime()
    calls, others = DeviceCalls(1, busy), DeviceCalls(1, busy)
    schedule = SchedulerOutput(None, [], [SequenceState([1], 1)])

    async def commit(_):
        pass

    async def main():
        for now, event in [(1, "start"), (2, "start"), (4, "finish"), (6, "finish"), (10, "start"), (13, "finish")]:
            clock[0] = now
            if event == "start":
                await calls.start(schedule, lambda: lambda: None, commit=commit)
            else:
                await calls.finish_oldest()
            assert calls.is_full == (now == 2) and bool(calls) == (now not in (6, 13))
        for now, event in [
            (20, calls.start),
            (21, others.start),
            (23, calls.finish_oldest),
            (24, others.finish_oldest),
        ]:
            clock[0] = now
            starts = event in (calls.start, others.start)
            await (event(schedule, lambda: lambda: None, commit=commit) if starts else event())
        clock[0] = 30
        with pytest.raises(ZeroDivisionError):
            await calls.start(schedule, lambda: 1 // 0, commit=commit)
        clock[0] = 40
        await calls.start(schedule, lambda: lambda: None, commit=commit)
        clock[0] = 42
        calls.forget()

    asyncio.run(main())
    assert busy.seconds == 5 + 3 + 4 + 0 + 2
